"""What the orchestrator says about itself and its stages, asked over gRPC as any client would."""

from __future__ import annotations

import queue
from typing import Any

import msgspec
import numpy as np
from skippy_stage.errors import SkippyError


class StatusError(SkippyError):
    """The orchestrator gave no status: not loaded yet, busy, or gone."""


class StageState(msgspec.Struct, frozen=True):
    """One stage as the orchestrator's heartbeat sees it."""

    name: str
    ready: bool
    reason: str = ""
    pid: int = 0


class Status(msgspec.Struct, frozen=True):
    """The orchestrator's answer to ``status``; fields that serve has no use for are left out."""

    ready: bool
    reason: str = ""
    draining: bool = False
    active: int = 0
    waiting: int = 0
    stages: tuple[StageState, ...] = ()

    @property
    def idle(self) -> bool:
        """True when no request is running or waiting."""
        return self.active == 0 and self.waiting == 0

    def describe(self) -> str:
        """One line for a person: which stage is missing and why, or the orchestrator's own reason."""
        missing = [
            f"{stage.name} ({stage.reason})" if stage.reason else stage.name
            for stage in self.stages
            if not stage.ready
        ]
        return "waiting for " + ", ".join(missing) if missing else self.reason or "ready"


def query_status(address: str, model: str, timeout_s: float = 5.0) -> Status:
    """Ask the orchestrator ``model`` at a gRPC address; raises StatusError without an answer in time."""
    import tritonclient.grpc as grpc

    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    request = grpc.InferInput("status", [1, 1], "BOOL")
    request.set_data_from_numpy(np.array([[True]]))
    client = grpc.InferenceServerClient(address)
    answered = False
    try:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(model, [request])
        result, error = answers.get(timeout=timeout_s)
        answered = True
        if error is not None:
            raise StatusError(f"{model}: {error.message()}")
        output = result.as_numpy("status")
        if output is None:
            raise StatusError(f"{model}: answered without a status")
        return msgspec.json.decode(output.reshape(-1)[0], type=Status)
    except queue.Empty:
        raise StatusError(f"{model}: no status within {timeout_s:g} s") from None
    except (grpc.InferenceServerException, msgspec.MsgspecError) as error:
        raise StatusError(f"{model}: {error}") from None
    finally:
        # Without an answer only cancelling ends the stream; closing it would wait for a hung model.
        client.stop_stream(cancel_requests=not answered)
        client.close()
