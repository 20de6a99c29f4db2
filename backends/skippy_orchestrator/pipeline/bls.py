"""Stages in this server, reached by Triton's business logic scripting (BLS).

Calls are blocking ``exec(decoupled=True)`` from a thread of our own: it returns at the stage's first
response, the acknowledgement. ``async_exec`` is slower (it is run_in_executor over exec) and has a
use-after-free before release 26.07, so it is never used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils
from skippy_stage import protocol
from skippy_stage.engines.base import Hidden
from skippy_stage.errors import ProtocolError, StageFault
from skippy_stage.protocol import DraftResult, FrameHeader, FrameResult, Refusal, StageStatus, StatusRequest

from skippy_orchestrator.pipeline.call_gate import CallGate
from skippy_orchestrator.pipeline.finished_calls import FINISHED
from skippy_orchestrator.pipeline.process import StageProcess
from skippy_orchestrator.pipeline.repository import ModelRepository

GATE: Final = CallGate()
"""That of this process."""
_SETTLED_WITHIN_S: Final = 5.0


class BlsPending:
    """A frame that a stage of this server has acknowledged."""

    def __init__(self, stage: str, responses: Iterator[Any]) -> None:
        self._stage = stage
        self._responses = responses

    def wait(self) -> tuple[FrameResult, Hidden | None]:
        """Block until the frame's result is there, as copies: shared memory is given back at once."""
        follows = False
        try:
            reply, hidden = _result_in(self._stage, self._responses)
            if not isinstance(reply, FrameResult):
                raise ProtocolError(f"{self._stage}: answered a frame with {type(reply).__name__}")
            follows = reply.drafts_follow
        finally:
            if not follows:
                _take_to_its_end(self._responses)
        return reply, hidden

    def drafts(self) -> DraftResult:
        """Block until the drafts behind the result are there."""
        reply, _ = _only_result(self._stage, self._responses)
        if not isinstance(reply, DraftResult):
            raise ProtocolError(
                f"{self._stage}: followed a result by {type(reply).__name__}, expected drafts"
            )
        return reply


class BlsTransport:
    """Frames to one stage model of this server; the last one has no hidden rows to give."""

    def __init__(self, name: str, *, last: bool, repository: ModelRepository | None = None) -> None:
        self.name = name
        self._repository = repository
        self._process: StageProcess | None = None
        self._outputs = [protocol.TENSOR_RESULT] if last else [protocol.TENSOR_RESULT, protocol.TENSOR_HIDDEN]

    def send(self, header: FrameHeader, tokens: npt.NDArray[np.int32], hidden: Hidden | None) -> BlsPending:
        """Send a frame; returns when the stage has acknowledged it."""
        tensors = [_header_tensor(header)]
        if len(tokens):
            tensors.append(pb_utils.Tensor(protocol.TENSOR_TOKENS, tokens))
        if hidden is not None:
            tensors.append(pb_utils.Tensor(protocol.TENSOR_HIDDEN, hidden))
        responses = self._exec(tensors, self._outputs)
        acknowledgement = next(responses, None)
        try:
            if acknowledgement is None:
                raise StageFault(self.name, "no acknowledgement")
            _reply_in(self.name, acknowledgement)
        except BaseException:
            FINISHED.keep(responses)
            raise
        return BlsPending(self.name, responses)

    def status(self, *, check_integrity: bool = False) -> StageStatus:
        """Ask the stage model for its status."""
        request = StatusRequest(check_integrity=check_integrity)
        reply, _ = _only_result(self.name, self._exec([_header_tensor(request)], [protocol.TENSOR_RESULT]))
        if not isinstance(reply, StageStatus):
            raise ProtocolError(f"{self.name}: answered a status request with {type(reply).__name__}")
        if self._process is None or self._process.pid != reply.pid:
            self._process = StageProcess(reply.pid)
        return reply

    def is_gone(self) -> bool:
        """Whether the stub's process has ended; it stays a zombie while the server lives."""
        process = self._process
        return process is not None and process.has_ended()

    def revive(self) -> None:
        """Have the server load the stage's model again."""
        if self._repository is None:
            # Asked again from now on, so that it is noticed when somebody has loaded the model.
            self._process = None
            raise StageFault(self.name, "its process has ended; load the model again, or restart the server")
        GATE.wait_settled(self, _SETTLED_WITHIN_S)
        self._repository.reload(self.name)
        self._process = None

    def _exec(self, tensors: list[Any], outputs: list[str]) -> Iterator[Any]:
        request = pb_utils.InferenceRequest(
            model_name=self.name, requested_output_names=outputs, inputs=tensors
        )
        with GATE.call(self):
            return iter(request.exec(decoupled=True))


def _header_tensor(message: protocol.Request) -> Any:
    return pb_utils.Tensor(protocol.TENSOR_HEADER, np.frombuffer(protocol.encode(message), np.uint8))


def _only_result(stage: str, responses: Iterator[Any]) -> tuple[protocol.Reply, Hidden | None]:
    """The last response with a result; the empty ones around it are the acknowledgement and FINAL."""
    try:
        return _result_in(stage, responses)
    finally:
        _take_to_its_end(responses)


def _take_to_its_end(responses: Iterator[Any]) -> None:
    while next(responses, None) is not None:
        pass
    FINISHED.keep(responses)


def _result_in(stage: str, responses: Iterator[Any]) -> tuple[protocol.Reply, Hidden | None]:
    for response in responses:
        reply = _reply_in(stage, response)
        if reply is not None:
            return reply
    raise StageFault(stage, "ended a call without a result")


def _reply_in(stage: str, response: Any) -> tuple[protocol.Reply, Hidden | None] | None:
    """What a response says, None when it is empty; raises StageFault for an error or a refusal."""
    if response.has_error():
        raise StageFault(stage, response.error().message())
    result = pb_utils.get_output_tensor_by_name(response, protocol.TENSOR_RESULT)
    if result is None:
        return None
    reply = protocol.decode_reply(result.as_numpy().tobytes())
    if isinstance(reply, Refusal):
        raise StageFault(stage, reply.message)
    hidden = pb_utils.get_output_tensor_by_name(response, protocol.TENSOR_HIDDEN)
    return reply, None if hidden is None else hidden.as_numpy().copy()
