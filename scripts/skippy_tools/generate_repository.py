"""``./scripts/generate_repository``: the model repository of a deployment file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from skippy_orchestrator.deployment import load_deployment
from skippy_stage.errors import SkippyError

from skippy_tools.command import run_script
from skippy_tools.paths import DEFAULT_DEPLOYMENT, MODEL_REPOSITORY, display
from skippy_tools.repository import differences, generate_for, read_shape, split_layers, write

console = Console(stderr=True, highlight=False)


def generate_repository(
    deployment: Annotated[
        Path,
        typer.Argument(help="Deployment file (TOML); docs/configuration.md lists its keys.", dir_okay=False),
    ] = DEFAULT_DEPLOYMENT,
    output: Annotated[
        Path, typer.Option(file_okay=False, help="Folder that the models' folders are written to.")
    ] = MODEL_REPOSITORY,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 when the folder is not as generated.")
    ] = False,
) -> None:
    """Generate the Triton model repository of a deployment: orchestrator, aliases and stages.

    The result runs with ./scripts/serve --model-repository, and with any tritonserver that has our
    backends in its backend directory.

    Examples:

      ./scripts/generate_repository

      ./scripts/generate_repository my.toml --output /models
    """
    try:
        chosen = load_deployment(deployment)
        shape = read_shape(chosen.model.path)
        files = generate_for(chosen, display(deployment))
        if check:
            wrong = differences(files, output)
            for line in wrong:
                console.print(line, markup=False)
            raise typer.Exit(1 if wrong else 0)
        write(files, output)
        for index, (first, last) in enumerate(split_layers(chosen, shape)):
            console.print(f"stage {index}: layers {first} to {last - 1}")
        console.print(f"{len(files) // 2} models written to {output}")
    except SkippyError as error:
        console.print(f"error: {error.message}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


def main() -> None:
    """Entry point of ./scripts/generate_repository."""
    run_script(generate_repository, "generate_repository")


if __name__ == "__main__":
    main()
