"""Triton adapter of the orchestrator and its aliases: tensors to requests and back, nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils
from skippy_stage.settings import from_parameters
from skippy_stage.weights import locate, open_checkpoint

from skippy_orchestrator.deployment import OrchestratorSettings, effective_context
from skippy_orchestrator.pipeline.bls import BlsTransport
from skippy_orchestrator.pipeline.repository import ModelRepository
from skippy_orchestrator.relay import CANCEL_PARAMETER, RELAY_PARAMETER, RelayModel
from skippy_orchestrator.requests import INPUTS, asks_status
from skippy_orchestrator.responses import RelayedResponder, Responder, ResponderSink, text_tensor
from skippy_orchestrator.service import Service
from skippy_orchestrator.text.tokenizer import TextModel, check_tokenizers


class TritonPythonModel:
    """The orchestrator as a decoupled Triton model, or one of its aliases (parameter ``alias_of``)."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer and start the service; raises with the reason, which Triton shows at load."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        sys.setswitchinterval(0.0002)
        alias_of = parameters.pop("alias_of", "")
        self._model = (
            RelayModel(alias_of, int(parameters["max_requests"])) if alias_of else Orchestrator(parameters)
        )

    def execute(self, requests: list[Any]) -> None:
        """Take requests; never raises, every request is answered through its sender."""
        self._model.execute(requests)

    def finalize(self) -> None:
        """Drain and stop all threads."""
        self._model.finalize()


class Orchestrator:
    """Requests of the orchestrator model to the service."""

    def __init__(self, parameters: dict[str, str]) -> None:
        settings = from_parameters(OrchestratorSettings, parameters)
        path = locate(settings.model)
        config = open_checkpoint(path).config
        context = effective_context(settings.context_tokens, config.context_length)
        run_dir = os.environ.get("SKIPPY_RUN_DIR")
        last = len(settings.stages) - 1
        repository = ModelRepository.of_environment()
        text = TextModel.load(path)
        draft = None
        if settings.draft_stage:
            check_tokenizers(
                settings.model, text, settings.draft_model, TextModel.load(locate(settings.draft_model))
            )
            draft = BlsTransport(settings.draft_stage, last=True, repository=repository)
        head = bool(settings.mtp_head) or config.mtp_layers > 0
        settings.speculation.check(head=head, draft_model=draft is not None)
        self._relayed: dict[str, int] = {}
        self._service = Service(
            settings,
            text,
            context,
            [
                BlsTransport(name, last=i == last, repository=repository)
                for i, name in enumerate(settings.stages)
            ],
            draft=draft,
            head=head,
            drain_file=Path(run_dir) / "drain" if run_dir else None,
        )
        self._service.start()

    def execute(self, requests: list[Any]) -> None:
        """Validate and submit requests, answer status requests."""
        for request in requests:
            parameters: dict[str, object] = json.loads(request.parameters() or "{}")
            relay = parameters.pop(RELAY_PARAMETER, None)
            relay = relay if isinstance(relay, str) else ""
            responder = (RelayedResponder if relay else Responder)(request.get_response_sender())
            try:
                self._receive(request, parameters, relay, responder)
            except Exception as error:
                responder.send_error(error)

    def _receive(self, request: Any, parameters: dict[str, object], relay: str, responder: Responder) -> None:
        inputs: dict[str, Any] = {}
        for name in INPUTS:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            if tensor is not None:
                inputs[name] = tensor.as_numpy()
        cancelled = parameters.pop(CANCEL_PARAMETER, None)
        if isinstance(cancelled, str):
            self._service.cancel(self._relayed.get(cancelled, 0))
        if asks_status(inputs, parameters):
            status = json.dumps(self._service.status())
            responder.send_tensors([text_tensor("status", status)], final=True)
            return
        generation = self._service.parse(inputs, parameters)
        self._service.check_ready()
        session = self._service.new_session()
        sink = ResponderSink(responder)
        if relay:
            # At once, so that a relay that waits for its first token holds no thread of the server's pool.
            responder.send_tensors([], final=False)
            self._relayed[relay] = session
            sink = RelayedSink(responder, self._relayed, relay)
        self._service.submit(session, generation, sink)

    def finalize(self) -> None:
        """Drain and stop all threads."""
        self._service.stop()


class RelayedSink(ResponderSink):
    """Answers a relayed request, and forgets its relay id with the last response."""

    def __init__(self, responder: Responder, relayed: dict[str, int], relay: str) -> None:
        super().__init__(responder)
        self._relayed = relayed
        self._relay = relay

    def send(self, request: Any, span: Any) -> None:
        """Send a span as one response."""
        try:
            super().send(request, span)
        finally:
            if span.final:
                self._relayed.pop(self._relay, None)
