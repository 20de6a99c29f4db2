"""Triton adapter of a request's answers: spans to response tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from skippy_stage.errors import ErrorCode, SkippyError

from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sending import Span


class ResponderSink:
    """Answers one request through its response sender; FINAL rides on the last data response."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, request: GenerationRequest, span: Span) -> None:
        """Send a span as one response."""
        if span.error is not None:
            send_error(self._sender, span.error)
            return
        tensors = [
            pb_utils.Tensor("text_output", np.array([[span.text.encode()]], dtype=np.object_)),
            pb_utils.Tensor("output_ids", np.array([span.tokens], dtype=np.int32)),
            pb_utils.Tensor("finish_reason", np.array([[span.finish_reason.encode()]], dtype=np.object_)),
            pb_utils.Tensor("num_input_tokens", np.array([[len(request.prompt)]], dtype=np.int32)),
            pb_utils.Tensor("num_output_tokens", np.array([[len(span.tokens)]], dtype=np.int32)),
            pb_utils.Tensor("seed", np.array([[request.sampling.seed]], dtype=np.uint64)),
        ]
        send_tensors(self._sender, tensors, final=span.final)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or is gone."""
        return bool(self._sender.is_cancelled())


def send_tensors(sender: Any, tensors: list[Any], *, final: bool) -> None:
    """Send one response; ``final`` ends the request."""
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)


def send_error(sender: Any, error: Exception) -> None:
    """End a request with an error: its code and message, never a traceback."""
    code = error.code if isinstance(error, SkippyError) else ErrorCode.INTERNAL
    message = error.message if isinstance(error, SkippyError) else f"orchestrator: {error}"
    # Triton's stub adds TritonError to the module only after it has imported the model.
    triton_code = getattr(pb_utils.TritonError, code.value)
    sender.send(
        pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(message, triton_code)),
        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    )
