"""Alias models: another name for the orchestrator, relayed so that a cancel gets through.

A Triton ensemble passes everything on but a client's cancel. A relay takes the request, calls the
orchestrator with a relay id of its own making, forwards every response, and when its client cancels sends
the orchestrator a cancel for that id. Relay ids are 128 random bits, so nobody else can cancel by guessing.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from skippy_stage.errors import ErrorCode, Unavailable

from skippy_orchestrator.pipeline.finished_calls import FINISHED
from skippy_orchestrator.requests import INPUTS, OUTPUTS
from skippy_orchestrator.responses import RELAYED_ERROR, Responder

RELAY_PARAMETER = "triton_skippy_relay"
CANCEL_PARAMETER = "triton_skippy_cancel"
_POLL_S = 0.05
_CANCEL_AGAIN_S = 0.5
"""A cancel can overtake its request, so it is sent again until the request has ended."""

log = logging.getLogger(__name__)


class RelayModel:
    """The alias as a Triton model: one thread per running request, one that watches for cancels."""

    def __init__(self, target: str, max_requests: int) -> None:
        self._target = target
        self._max_requests = max_requests
        self._clients: dict[str, Responder] = {}
        self._cancel_sent: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._poller = threading.Thread(target=self._poll, name="relay-poller", daemon=True)
        self._poller.start()

    def execute(self, requests: list[Any]) -> None:
        """Start a relay for every request; never raises."""
        for request in requests:
            client = Responder(request.get_response_sender())
            try:
                self._start(request, client)
            except Exception as error:
                client.send_error(error)

    def finalize(self) -> None:
        """End what is still running and stop watching."""
        self._stopping.set()
        self._poller.join(1.0)

    def _start(self, request: Any, client: Responder) -> None:
        inputs = []
        for name in INPUTS:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                inputs.append(pb_utils.Tensor(name, tensor.as_numpy().copy()))
        relay = secrets.token_hex(16)
        parameters = {**json.loads(request.parameters() or "{}"), RELAY_PARAMETER: relay}
        call = pb_utils.InferenceRequest(
            model_name=self._target,
            requested_output_names=list(OUTPUTS),
            inputs=inputs,
            request_id=request.request_id(),
            parameters=parameters,
        )
        with self._lock:
            if len(self._clients) >= self._max_requests:
                raise Unavailable(f"{self._max_requests} requests are relayed already, retry later")
            self._clients[relay] = client
        threading.Thread(target=self._relay, args=(relay, call, client), name="relay", daemon=True).start()

    def _relay(self, relay: str, call: Any, client: Responder) -> None:
        try:
            responses = call.exec(decoupled=True)
            try:
                _forward(iter(responses), client)
            finally:
                FINISHED.keep(responses)
        except Exception as error:
            client.send_error(error)
        finally:
            with self._lock:
                del self._clients[relay]
                self._cancel_sent.pop(relay, None)

    def _poll(self) -> None:
        while not self._stopping.wait(_POLL_S):
            now = time.monotonic()
            with self._lock:
                recent = {r for r, at in self._cancel_sent.items() if now - at < _CANCEL_AGAIN_S}
                watched = [(r, c) for r, c in self._clients.items() if r not in recent]
            for relay, client in watched:
                try:
                    if client.is_cancelled():
                        with self._lock:
                            if relay in self._clients:
                                self._cancel_sent[relay] = now
                        threading.Thread(target=self._cancel, args=(relay,), daemon=True).start()
                except Exception:
                    log.exception("a client's state could not be read")

    def _cancel(self, relay: str) -> None:
        call = pb_utils.InferenceRequest(
            model_name=self._target,
            requested_output_names=["status"],
            inputs=[pb_utils.Tensor("status", np.array([[True]]))],
            parameters={CANCEL_PARAMETER: relay, RELAY_PARAMETER: relay},
        )
        try:
            responses = call.exec(decoupled=True)
            for response in responses:
                if response.has_error():
                    log.warning("a cancel was not taken: %s", response.error().message())
            FINISHED.keep(responses)
        except Exception:
            log.exception("a cancel could not be sent")


def _forward(responses: Iterator[Any], client: Responder) -> None:
    """Pass every response on; the one with a finish reason, a status or an error carries FINAL."""
    ended = False
    for response in responses:
        if ended:
            continue
        if response.has_error():
            client.send_triton_error(response.error())
            ended = True
            continue
        tensors = [pb_utils.Tensor(t.name(), t.as_numpy().copy()) for t in response.output_tensors()]
        if tensors:
            by_name = {tensor.name(): tensor for tensor in tensors}
            reason = _text(by_name, "finish_reason")
            ended = "status" in by_name or bool(reason)
            if reason == RELAYED_ERROR:
                code, _, message = _text(by_name, "text_output").partition(": ")
                client.send_coded_error(ErrorCode(code), message)
            else:
                client.send_tensors(tensors, final=ended)
    if not ended:
        raise RuntimeError("the orchestrator ended a call without a last response")


def _text(tensors: dict[str, Any], name: str) -> str:
    tensor = tensors.get(name)
    return "" if tensor is None else tensor.as_numpy().flat[0].decode()
