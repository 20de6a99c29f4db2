"""``./scripts/doctor``: what this machine has of what a server needs."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from skippy_orchestrator.deployment import Deployment, load_deployment
from skippy_stage.errors import SkippyError

from skippy_tools import guard
from skippy_tools.command import run_script
from skippy_tools.paths import DEFAULT_DEPLOYMENT
from skippy_tools.repository import read_shape
from skippy_tools.triton import OLDEST, find_tritonserver

SHM_NEEDED_MIB = 256


def check_python() -> str:
    """Version and place of the running Python."""
    return f"{platform.python_version()}, {sys.executable}"


def check_tritonserver() -> str:
    """The tritonserver that serve would take."""
    server = find_tritonserver()
    version = server.version or f"version unknown until it runs, at least {OLDEST} is needed"
    return f"{version}, {server.origin}, {server.binary}"


def check_model(deployment: Deployment) -> str:
    """The deployment's model."""
    shape = read_shape(deployment.model.path)
    return f"{deployment.model.path}: {shape.n_layers} layers, context {shape.context_length}"


def check_shared_memory(deployment: Deployment) -> str:
    """Room for the shared-memory region of every model instance, and what dead servers left there."""
    free = shutil.disk_usage(guard.SHM).free >> 20
    stages = len(deployment.stages) or deployment.pipeline.stages
    models = 1 + len(deployment.server.aliases) + stages
    needed = max(SHM_NEEDED_MIB, 2 * models * deployment.server.shm_mib)
    if free < needed:
        raise SkippyError(
            f"{free} MiB free in {guard.SHM}, {needed} needed (containers: --shm-size={needed}m or more)"
        )
    swept = guard.sweep_dead()
    return f"{free} MiB free" + (f", removed what {len(swept)} dead servers left" if swept else "")


def check_ports(deployment: Deployment) -> str:
    """Whether the deployment's ports are free."""
    section = deployment.server
    taken = []
    for port in (section.http_port, section.grpc_port, section.metrics_port):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((section.host, port))
            except OSError:
                taken.append(str(port))
    if taken:
        raise SkippyError(f"in use: {', '.join(taken)}; serve --http-port 0 (and so on) takes free ones")
    return f"{section.http_port}, {section.grpc_port}, {section.metrics_port} are free"


def doctor(
    deployment: Annotated[
        Path, typer.Argument(help="Deployment file (TOML).", dir_okay=False)
    ] = DEFAULT_DEPLOYMENT,
) -> None:
    """Check what a server of this deployment needs; exits 1 when something is missing."""
    console = Console(highlight=False)
    healthy = True
    try:
        chosen = load_deployment(deployment)
    except SkippyError as error:
        console.print(error.message, style="red", markup=False)
        raise typer.Exit(1) from None
    checks: dict[str, Callable[[], str]] = {
        "Python": check_python,
        "tritonserver": check_tritonserver,
        "model": lambda: check_model(chosen),
        "cores": lambda: str(len(os.sched_getaffinity(0))),
        "shared memory": lambda: check_shared_memory(chosen),
        "ports": lambda: check_ports(chosen),
    }
    for name, check in checks.items():
        try:
            console.print(f"[green]ok     [/green] {name:14}", escape(check()), soft_wrap=True)
        except SkippyError as error:
            healthy = False
            console.print(f"[red]missing[/red] {name:14}", escape(error.message), soft_wrap=True)
    raise typer.Exit(0 if healthy else 1)


def main() -> None:
    """Entry point of ./scripts/doctor."""
    run_script(doctor, "doctor")


if __name__ == "__main__":
    main()
