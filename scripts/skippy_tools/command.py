"""Running a function as one of the scripts in ``scripts/``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer


def run_script(function: Callable[..., Any], script: str) -> None:
    """Parse the command line for ``function``; help and errors call it by the name that was typed."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    app(prog_name=f"./scripts/{script}")
