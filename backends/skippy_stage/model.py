"""Triton adapter of a stage: tensors to frames and back, nothing else."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from skippy_stage.engines.environment import prepare_environment

prepare_environment()

from skippy_stage import protocol  # noqa: E402
from skippy_stage.engines import create_engine  # noqa: E402
from skippy_stage.engines.base import Hidden  # noqa: E402
from skippy_stage.errors import ProtocolError, SkippyError  # noqa: E402
from skippy_stage.identity import stage_identity  # noqa: E402
from skippy_stage.prefix.activations import ActivationCache  # noqa: E402
from skippy_stage.prefix.factory import make_prefix_store  # noqa: E402
from skippy_stage.prefix.kill_switch import prefix_cache_killed  # noqa: E402
from skippy_stage.runtime import StageRuntime  # noqa: E402
from skippy_stage.settings import StageSettings, from_parameters  # noqa: E402
from skippy_stage.worker import StageWorker  # noqa: E402

_STOP_LIMIT_S = 10.0
_CRASHED = 70
"""Exit status of the process when its worker fails: the orchestrator then has the stage loaded again."""


class TritonPythonModel:
    """One stage as a decoupled Triton model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the stage's layers; raises with the reason, which Triton shows at load."""
        parameters = json.loads(args["model_config"])["parameters"]
        settings = from_parameters(StageSettings, {key: p["string_value"] for key, p in parameters.items()})
        sys.setswitchinterval(0.0002)
        self._worker: StageWorker[Caller] = StageWorker(
            lambda: self._load(settings), _respond, settings.name, on_crash=lambda: os._exit(_CRASHED)
        )
        self._runtime = self._worker.start()

    def _load(self, settings: StageSettings) -> StageRuntime[Caller]:
        self._engine = create_engine(settings)
        payload = "off" if prefix_cache_killed(os.environ) else settings.prefix_payload
        prefixes = make_prefix_store(
            self._engine,
            payload,
            max_entries=settings.prefix_max_entries,
            max_bytes=settings.prefix_max_bytes,
        )
        return StageRuntime(
            self._engine,
            settings.name,
            settings.index,
            threads=settings.threads,
            prefixes=prefixes,
            activations=ActivationCache(settings.activation_bytes),
            identity=stage_identity(settings, self._engine.info),
        )

    def execute(self, requests: list[Any]) -> None:
        """Acknowledge and queue frames, answer status requests; never raises."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._receive(request, sender)
            except SkippyError as error:
                _refuse(sender, error.message)
            except Exception as error:
                _refuse(sender, f"{type(error).__name__}: {error}")

    def _receive(self, request: Any, sender: Any) -> None:
        header = _array(request, protocol.TENSOR_HEADER)
        if header is None:
            raise ProtocolError("a frame without a header")
        message = protocol.decode_request(header.tobytes())
        if isinstance(message, protocol.StatusRequest):
            status = self._runtime.status(check_integrity=message.check_integrity)
            _send(sender, [_bytes_tensor(protocol.encode(status))], final=True)
            return
        tokens = _array(request, protocol.TENSOR_TOKENS)
        hidden = _array(request, protocol.TENSOR_HIDDEN)
        caller = Caller(sender)
        dropped = self._runtime.accept(
            message,
            np.empty(0, np.int32) if tokens is None else tokens.copy(),
            None if hidden is None else hidden.copy(),
            caller,
        )
        # The worker computes already; an answer that is ready sooner waits for the acknowledgement.
        caller.acknowledge()
        for old in dropped:
            old.refuse("the pipeline started anew before this frame ran")

    def finalize(self) -> None:
        """Stop the worker and free the engine."""
        if self._worker.stop(_STOP_LIMIT_S):
            self._engine.shutdown()


class Caller:
    """Who waits for a frame: told at once that it was taken, and later what became of it."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._acknowledged = threading.Event()

    def acknowledge(self) -> None:
        """The empty first response, at which the caller's call returns."""
        try:
            _send(self._sender, [], final=False)
        finally:
            self._acknowledged.set()

    def answer(self, tensors: list[Any], *, final: bool = True) -> None:
        """A response; the last one, unless it is said that another follows."""
        self._acknowledged.wait()
        _send(self._sender, tensors, final=final)

    def refuse(self, message: str) -> None:
        """The last response of a frame that was not executed."""
        self.answer([_bytes_tensor(protocol.encode(protocol.Refusal(message=message)))])


def _respond(
    caller: Caller, result: protocol.FrameResult | protocol.DraftResult, hidden: Hidden | None
) -> None:
    tensors = [_bytes_tensor(protocol.encode(result))]
    if hidden is not None:
        tensors.append(pb_utils.Tensor(protocol.TENSOR_HIDDEN, np.ascontiguousarray(hidden)))
    caller.answer(tensors, final=isinstance(result, protocol.DraftResult) or not result.drafts_follow)


def _bytes_tensor(data: bytes) -> Any:
    return pb_utils.Tensor(protocol.TENSOR_RESULT, np.frombuffer(data, np.uint8))


def _array(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _send(sender: Any, tensors: list[Any], *, final: bool) -> None:
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)


def _refuse(sender: Any, message: str) -> None:
    _send(sender, [_bytes_tensor(protocol.encode(protocol.Refusal(message=message)))], final=True)
