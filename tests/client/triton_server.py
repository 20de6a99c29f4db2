"""A real tritonserver with the scripted model, on free ports."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from skippy_orchestrator.deployment import Deployment, ServerSection
from skippy_tools.pbtxt import ModelConfig, render
from skippy_tools.repository import INPUTS, OUTPUTS
from skippy_tools.server import ServerProcess


@contextlib.contextmanager
def run_scripted_server(folder: Path) -> Iterator[ServerProcess]:
    """Start the server, wait until it is ready, and leave nothing of it at the end.

    The model has exactly the tensors of the orchestrator, and the Python backend instead of ours.
    """
    model = folder / "repository" / "skippy"
    (model / "1").mkdir(parents=True)
    shutil.copy(Path(__file__).with_name("scripted_model.py"), model / "1" / "model.py")
    (model / "config.pbtxt").write_text(render(ModelConfig("skippy", "python", 1, INPUTS, OUTPUTS, {})))
    deployment = Deployment(server=ServerSection(http_port=0, grpc_port=0, metrics_port=0))
    with ServerProcess(deployment, model_repository=folder / "repository") as server:
        yield server
