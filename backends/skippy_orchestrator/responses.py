"""Triton adapter of a request's answers: spans to response tensors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import triton_python_backend_utils as pb_utils
from skippy_stage.errors import ErrorCode, SkippyError

from skippy_orchestrator.pipeline.finished_calls import FINISHED
from skippy_orchestrator.requests import GenerationRequest
from skippy_orchestrator.sending import Span
from skippy_orchestrator.speculation.counters import SpeculationCounters

RELAYED_ERROR: Final = "error"


class Responder:
    """A request's response sender that may be used from several threads.

    Triton 2.51 frees what ``is_cancelled`` looks at once FINAL has been sent, and crashes the whole server
    if the two meet; so they never do.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._ended = False

    def send_tensors(self, tensors: Sequence[Any], *, final: bool) -> None:
        """Send one response; ``final`` ends the request, and FINAL rides on the data."""
        self._send(pb_utils.InferenceResponse(output_tensors=list(tensors)), final)

    def send_error(self, error: Exception) -> None:
        """End the request with an error, never a traceback; nothing when it has ended.

        The message starts with the code's name: a gRPC stream of Triton's passes on the message alone.
        """
        code = error.code if isinstance(error, SkippyError) else ErrorCode.INTERNAL
        self.send_coded_error(
            code, error.message if isinstance(error, SkippyError) else f"orchestrator: {error}"
        )

    def send_coded_error(self, code: ErrorCode, message: str) -> None:
        """End the request with an error given by its parts."""
        # Triton's stub adds TritonError to the module only after it has imported the model.
        triton_error = pb_utils.TritonError(
            f"{code.value}: {message}", getattr(pb_utils.TritonError, code.value)
        )
        self.send_triton_error(triton_error)

    def send_triton_error(self, error: Any) -> None:
        """End the request with an error that is Triton's already."""
        self._send(pb_utils.InferenceResponse(output_tensors=[], error=error), True)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or is gone; False once the request has ended."""
        with self._lock:
            if self._ended:
                return False
            mark = FINISHED.mark()
            cancelled = bool(self._sender.is_cancelled())
            if not cancelled:  # "cancelled" may have been remembered, without a round trip
                FINISHED.passed(mark)
            return cancelled

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self._ended:
                return
            self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)
            self._ended = final


class RelayedResponder(Responder):
    """Answers a relay, to which errors go as data (skippy_stage.protocol.Refusal says why).

    An error is a last response with finish_reason ``error`` and ``CODE: message`` as its text.
    """

    def send_coded_error(self, code: ErrorCode, message: str) -> None:
        """End the request with an error as data."""
        tensors = [
            text_tensor("text_output", f"{code.value}: {message}"),
            text_tensor("finish_reason", RELAYED_ERROR),
        ]
        self.send_tensors(tensors, final=True)


def text_tensor(name: str, text: str) -> Any:
    """A string output, [1, 1]."""
    return pb_utils.Tensor(name, np.array([[text.encode()]], dtype=np.object_))


class ResponderSink:
    """Answers a generation with one response for every span."""

    def __init__(self, responder: Responder) -> None:
        self._responder = responder

    def send(self, request: GenerationRequest, span: Span) -> None:
        """Send a span as one response."""
        if span.error is None or (request.stream and span.tokens):
            self._send_data(request, span)
        if span.error is not None:
            self._responder.send_error(span.error)

    def _send_data(self, request: GenerationRequest, span: Span) -> None:
        tensors = [
            text_tensor("text_output", span.text),
            pb_utils.Tensor("output_ids", np.array([span.tokens], dtype=np.int32)),
            text_tensor("finish_reason", span.finish_reason),
            pb_utils.Tensor("num_input_tokens", np.array([[len(request.prompt)]], dtype=np.int32)),
            pb_utils.Tensor("num_output_tokens", np.array([[len(span.tokens)]], dtype=np.int32)),
            pb_utils.Tensor("seed", np.array([[request.sampling.seed]], dtype=np.uint64)),
        ]
        if span.cache is not None:
            cached = np.array([[span.cache.cached_prompt_tokens]], dtype=np.int32)
            tensors.append(pb_utils.Tensor("cached_tokens", cached))
            tensors.append(text_tensor("cache_stats", span.cache.to_json()))
        if span.speculation is not None:
            tensors += _speculation_tensors(span.speculation)
        self._responder.send_tensors(tensors, final=span.final and span.error is None)

    def is_cancelled(self) -> bool:
        """Whether the client has cancelled or is gone."""
        return self._responder.is_cancelled()


def _speculation_tensors(counters: SpeculationCounters) -> list[Any]:
    drafts, accepted = counters.draft_tokens, counters.accepted_draft_tokens
    return [
        pb_utils.Tensor("total_draft_tokens", np.array([[drafts]], dtype=np.int32)),
        pb_utils.Tensor("total_accepted_draft_tokens", np.array([[accepted]], dtype=np.int32)),
        pb_utils.Tensor("acceptance_rate", np.array([[counters.acceptance_rate]], dtype=np.float32)),
    ]
