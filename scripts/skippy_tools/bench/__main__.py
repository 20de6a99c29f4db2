"""``./scripts/bench``: the command line of all benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from skippy_client import SkippyError as ClientError
from skippy_orchestrator.deployment import ModelSection, load_deployment
from skippy_stage.errors import SkippyError

from skippy_tools.bench import decode as decode_bench
from skippy_tools.bench import prefill_plan, speculation_plan
from skippy_tools.bench.decode_rows import print_decode_rows
from skippy_tools.bench.prefill import run_prefill
from skippy_tools.bench.prefill_ratios import Own
from skippy_tools.bench.prefill_report import print_prefill_rows
from skippy_tools.bench.prefill_rows import policy_label
from skippy_tools.bench.report import write_json
from skippy_tools.bench.speculation import run_speculation
from skippy_tools.bench.speculation_rows import print_speculation_rows
from skippy_tools.paths import HEAD_FILE
from skippy_tools.server import ServerError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure this server and its peers in one run."
)
console = Console(highlight=False)

DEFAULT = Path(__file__).parents[3] / "deployments" / "smollm2-two-stages.toml"
CACHE = Path.home() / ".cache" / "skippy" / "bench"

DeploymentFile = Annotated[
    Path, typer.Argument(help="Deployment file whose model and settings are measured.")
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="The same kinds of rows in under three minutes: fewer rounds, shorter prompts."
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the rows there as a JSON list.")]


@app.callback()
def main() -> None:
    """Figures on a busy machine are noisy: read ratios within one run, not absolute numbers."""


@app.command()
def decode(deployment: DeploymentFile = DEFAULT, quick: Quick = False, json_file: JsonFile = None) -> None:
    """Decode and prefill rates: transformers, llama.cpp F16, our engines in one process, and the server.

    The server and the engines run with 1, 2 and 3 stages at concurrency 1, 4 and 16; every subject gets the
    same weights and prompts. Example: ./scripts/bench decode --quick --json rows.json
    """
    with _errors_as_lines():
        plan = decode_bench.QUICK if quick else decode_bench.FULL
        rows = decode_bench.run_decode(load_deployment(deployment), plan, CACHE, console)
    print_decode_rows(console, rows)
    if json_file is not None:
        write_json(json_file, rows)


@app.command()
def prefill(deployment: DeploymentFile = DEFAULT, quick: Quick = False, json_file: JsonFile = None) -> None:
    """Time to first token: by prompt length, stages, chunk policy and what the prefix cache has of the prompt.

    Cold prompts on transformers, llama.cpp F16 and the server with 1, 2 and 3 stages; on the server also the
    same prompt again, a new question behind a known system prompt, the next turn of a chat, and what a long
    prompt costs streams that run. Example: ./scripts/bench prefill --quick --json rows.json
    """
    with _errors_as_lines():
        measured = load_deployment(deployment)
        plan = prefill_plan.QUICK if quick else prefill_plan.FULL
        rows = run_prefill(measured, plan, CACHE, console)
    print_prefill_rows(console, rows, Own(policy_label(measured.prefill), measured.pipeline.threads))
    if json_file is not None:
        write_json(json_file, rows)


@app.command()
def speculation(
    deployment: DeploymentFile = DEFAULT,
    quick: Quick = False,
    head: Annotated[
        Path | None, typer.Option(help="An MTP head for the model; the one in heads/ by default, if it fits.")
    ] = None,
    part: Annotated[
        list[str] | None, typer.Option(help="Measure this part alone: peers, server or links; repeatable.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(help="Only such prompts: copy, chat, code or random; repeatable.")
    ] = None,
    stages: Annotated[list[int] | None, typer.Option(min=1, help="Only so many stages; repeatable.")] = None,
    depth: Annotated[
        list[int] | None, typer.Option(min=1, max=8, help="Only so many windows in flight; repeatable.")
    ] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(min=1, max=8, help="Only so many streams at a time; repeatable.")
    ] = None,
    delay: Annotated[
        list[float] | None, typer.Option(min=0, help="Only links so slow, in ms; repeatable.")
    ] = None,
    width: Annotated[
        list[int] | None, typer.Option(min=1, max=16, help="Only windows so wide on slow links; repeatable.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds of everything.")] = None,
    tokens: Annotated[int | None, typer.Option(min=8, help="Tokens of an answer.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Decode rates with and without guessing ahead: by prompts, proposer, depth, stages and link delay.

    Prompts that copy, chats, code and random text; n-grams, an MTP head and both together; transformers and
    llama.cpp with their own prompt lookup. Then slow links between four stages, with stages that compute and with
    stages that only wait. Without options it takes more than an hour.

    Examples:

      ./scripts/bench speculation --quick --json rows.json

      ./scripts/bench speculation --part server --kind random --stages 2 --depth 2 --concurrency 1 --rounds 15
    """
    with _errors_as_lines():
        measured = load_deployment(deployment)
        if head is None and measured.model.path == ModelSection().path and HEAD_FILE.exists():
            head = HEAD_FILE
        try:
            plan = speculation_plan.narrowed(
                speculation_plan.QUICK if quick else speculation_plan.FULL,
                parts=part, kinds=kind, stages=stages, depths=depth, concurrency=concurrency,
                delays_ms=delay, widths=width, rounds=rounds, tokens=tokens,
            )  # fmt: skip
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        rows = run_speculation(measured, plan, head, CACHE, console)
    print_speculation_rows(console, rows)
    if json_file is not None:
        write_json(json_file, rows)


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    try:
        yield
    except (SkippyError, ClientError) as error:
        if isinstance(error, ServerError) and error.log:
            console.print(error.log, style="dim", markup=False, soft_wrap=True)
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    app(prog_name="./scripts/bench")
