"""A trivial model in the place of the orchestrator, so that the launcher is tested by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from skippy_orchestrator.deployment import Deployment
from skippy_tools.paths import ROOT
from skippy_tools.pbtxt import ModelConfig, Tensor, render

from tests.triton_server import deployment

NAME = "trivial"
TOML = f"""
[server]
name = "{NAME}"
http_port = 0
grpc_port = 0
metrics_port = 0

[limits]
drain_timeout_s = 10
"""


def trivial_deployment() -> Deployment:
    return deployment(TOML)


def trivial_repository(folder: Path, **parameters: float) -> Path:
    """A repository with the trivial model; parameters are those that trivial_model.py reads."""
    config = ModelConfig(
        name=NAME,
        backend="python",
        max_batch_size=1,
        inputs=(Tensor("status", "BOOL", (1,), optional=True),),
        outputs=(Tensor("status", "STRING", (1,)),),
        parameters={key: str(value) for key, value in parameters.items()},
    )
    model = folder / "models" / NAME
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(render(config))
    shutil.copy(Path(__file__).parent / "trivial_model.py", model / "1" / "model.py")
    return model.parent


class Serve:
    """``serve`` as a process of its own, on a trivial repository."""

    def __init__(self, folder: Path, **parameters: float) -> None:
        self.endpoints = folder / "endpoints.json"
        self.output = folder / "output"
        file = folder / "trivial.toml"
        file.write_text(TOML)
        repository = trivial_repository(folder, **parameters)
        paths = [str(ROOT / package) for package in ("backends", "client", "scripts")]
        (folder / "tmp").mkdir()
        self.tmp = folder / "tmp"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "skippy_tools.serve",
                    str(file),
                    f"--model-repository={repository}",
                    f"--json-endpoints={self.endpoints}",
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(self.tmp)},
            )
        self.prefix = f"skippy_{self.process.pid}_"

    def wait_until_ready(self, limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not self.endpoints.exists():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.05)
