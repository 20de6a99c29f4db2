"""``./scripts/bench``: the command line of all benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from skippy_orchestrator.deployment import load_deployment
from skippy_stage.errors import SkippyError

from skippy_tools.bench.decode import FULL, QUICK, run_decode
from skippy_tools.bench.rows import print_rows, write_json

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure this server and its peers in one run."
)

DEFAULT = Path(__file__).parents[3] / "deployments" / "smollm2-two-stages.toml"
CACHE = Path.home() / ".cache" / "skippy" / "bench"


@app.callback()
def main() -> None:
    """Figures on a busy machine are noisy: read ratios within one run, not absolute numbers."""


@app.command()
def decode(
    deployment: Annotated[
        Path, typer.Argument(help="Deployment file whose model and settings are measured.")
    ] = DEFAULT,
    quick: Annotated[
        bool, typer.Option("--quick", help="The same rows in under three minutes, fewer rounds.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the rows there as a JSON list.")
    ] = None,
) -> None:
    """Decode and prefill rates: transformers, llama.cpp F16, our engines in one process, and the server.

    The server and the engines run with 1, 2 and 3 stages at concurrency 1, 4 and 16; every subject gets the
    same weights and prompts. Example: ./scripts/bench decode --quick --json rows.json
    """
    console = Console()
    try:
        rows = run_decode(load_deployment(deployment), QUICK if quick else FULL, CACHE, console)
    except SkippyError as error:
        console.print(f"[red]{error.message}")
        raise typer.Exit(1) from None
    print_rows(console, rows)
    if json_file is not None:
        write_json(json_file, rows)


if __name__ == "__main__":
    app(prog_name="./scripts/bench")
