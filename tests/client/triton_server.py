"""A real tritonserver with the scripted model, on free ports."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from skippy_orchestrator.deployment import Deployment, ServerSection
from skippy_tools.paths import MODEL_REPOSITORY
from skippy_tools.server import ServerProcess

from tests.triton_server import assert_no_traces

OURS = 'backend: "skippy_orchestrator"'


@contextlib.contextmanager
def run_scripted_server(folder: Path) -> Iterator[ServerProcess]:
    """Start the server, wait until it is ready, and assert that nothing of it is left at the end.

    The model has the committed configuration of the orchestrator, with Triton's Python backend as backend.
    """
    config = (MODEL_REPOSITORY / "skippy" / "config.pbtxt").read_text()
    assert OURS in config
    model = folder / "repository" / "skippy"
    (model / "1").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("scripted_model.py"), model / "1" / "model.py")
    (model / "config.pbtxt").write_text(config.replace(OURS, 'backend: "python"'))
    deployment = Deployment(server=ServerSection(http_port=0, grpc_port=0, metrics_port=0))
    server = ServerProcess(deployment, model_repository=folder / "repository")
    try:
        with server:
            yield server
    finally:
        assert_no_traces(server.shm_prefix)
