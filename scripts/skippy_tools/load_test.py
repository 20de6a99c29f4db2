"""``./scripts/load_test``: a concurrency sweep with perf_analyzer against a running or a new server."""

from __future__ import annotations

import itertools
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from skippy_client import InvalidRequest, ServerUnavailable, SkippyClient
from skippy_client import SkippyError as ClientError
from skippy_orchestrator.deployment import load_deployment
from skippy_stage.errors import SkippyError

from skippy_tools.command import run_script
from skippy_tools.load_test_analyzer import Load, find_analyzer, run_load
from skippy_tools.load_test_report import Level, render, summarize
from skippy_tools.paths import DEFAULT_DEPLOYMENT, display
from skippy_tools.serve import with_overrides
from skippy_tools.server import ServerError, ServerProcess

TEXT: Final = (
    "the river runs past mills and meadows while a letter waits on the table of an old house where nobody "
    "has counted the clocks and every engine in the valley turns at a speed of its own until evening"
)

STDOUT: Final = Path("-")
PLAIN_WIDTH: Final = 120
"""Columns for output that isn't a terminal, where nobody told us a width."""

out = Console(highlight=False, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
err = Console(stderr=True, highlight=False)


def load_test(
    url: Annotated[str, typer.Option(help="Host and gRPC port of the server.", envvar="SKIPPY_URL")] = (
        "127.0.0.1:8001"
    ),
    model: Annotated[str, typer.Option(help="Model to drive: the orchestrator or an alias.")] = "skippy",
    start: Annotated[
        bool, typer.Option("--start", help="Start a server of --deployment on free ports, and stop it after.")
    ] = False,
    deployment: Annotated[
        Path, typer.Option(help="Deployment file for --start.", exists=True, dir_okay=False)
    ] = DEFAULT_DEPLOYMENT,
    stages: Annotated[
        int | None, typer.Option(min=1, help="Stages for --start, instead of the file's.")
    ] = None,
    concurrency: Annotated[
        str,
        typer.Option(help="Levels: 1:16 doubles from 1 to 16, 1:16:3 goes in steps of 3, 1,4,16 lists them."),
    ] = "1:16",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests per level, at least its concurrency; 8 or twice it by itself."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of each answer; the end token is ignored.")
    ] = 64,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt of every request; the prefix cache serves it.")
    ] = None,
    prompt_words: Annotated[
        int, typer.Option(min=1, help="Words of the prompts made up without --prompt; no two start alike.")
    ] = 32,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds until a level is given up.")] = 600.0,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Write the figures to this file; - prints them instead of the table."),
    ] = None,
) -> None:
    """Drive a server with perf_analyzer (gRPC streaming) and print latencies and throughput by concurrency.

    Exit status: 0 done, 1 failed requests or a failed run, 2 bad input, 3 server unavailable.

    Examples:

      ./scripts/load_test --concurrency 1:16

      ./scripts/load_test --start --concurrency 1,4,16 --max-tokens 32 --json figures.json

      ./scripts/load_test --url gpu-host:8001 --concurrency 1:64 --prompt-words 500
    """
    levels = parse_levels(concurrency)
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"--json {json_file}: no folder {json_file.parent}")
    try:
        with tempfile.TemporaryDirectory(prefix="skippy-load-") as scratch:
            folder = Path(scratch)
            libraries = folder / "lib"
            libraries.mkdir()
            analyzer = find_analyzer(libraries)
            with target(url, model, deployment if start else None, stages) as (url, model):
                warm_up(url, model)
                name = secrets.token_hex(4)
                loads = [
                    Load(
                        url=url,
                        model=model,
                        concurrency=level,
                        requests=max(level, requests or max(8, 2 * level)),
                        inputs=make_inputs(
                            f"{name}.{level}",
                            prompt,
                            prompt_words,
                            max_tokens,
                            max(level, requests or max(8, 2 * level)),
                        ),
                        timeout_s=timeout,
                    )
                    for level in levels
                ]
                with Progress(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    MofNCompleteColumn(),
                    TextColumn("requests"),
                    TimeElapsedColumn(),
                    console=err,
                ) as progress:
                    task = progress.add_task("", total=sum(load.requests for load in loads))
                    results = []
                    for load in loads:
                        progress.update(task, description=f"concurrency {load.concurrency}")
                        run = run_load(analyzer, load, folder)
                        results.append(summarize(load.concurrency, run.requests, run.errors))
                        progress.advance(task, load.requests)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (SkippyError, ClientError) as error:
        if isinstance(error, ServerError) and error.log:
            err.print(error.log, style="dim", markup=False, soft_wrap=True)
        err.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(exit_code(error)) from None
    report(results, max_tokens, model, json_file)


def exit_code(error: Exception) -> int:
    """The exit status for an error that ends the test."""
    match error:
        case InvalidRequest():
            return 2
        case ServerUnavailable() | ServerError():
            return 3
        case _:
            return 1


def parse_levels(text: str) -> list[int]:
    """The concurrencies of ``first:last``, ``first:last:step`` or ``a,b,c``."""
    try:
        parts = [int(part) for part in text.replace(",", ":").split(":")]
    except ValueError:
        raise typer.BadParameter(f"--concurrency {text}: expected numbers such as 1:16 or 1,4,16") from None
    swept = ":" in text
    if min(parts) < 1 or (swept and ("," in text or len(parts) > 3)):
        raise typer.BadParameter(f"--concurrency {text}: expected 1:16, 1:16:3 or 1,4,16, from 1 up")
    if not swept:
        return sorted(set(parts))
    first, last = parts[:2]
    if last < first:
        raise typer.BadParameter(f"--concurrency {text}: the last is below the first")
    if len(parts) == 3:
        return list(range(first, last + 1, parts[2]))
    levels = [first]
    while levels[-1] * 2 < last:
        levels.append(levels[-1] * 2)
    return levels if last == first else [*levels, last]


def make_inputs(
    name: str, prompt: str | None, words: int, max_tokens: int, count: int
) -> list[dict[str, Any]]:
    """The requests that perf_analyzer takes in turn.

    Made-up prompts differ from their first word on, between levels and runs too (``name`` is theirs): the
    prefix cache would otherwise serve what is to be measured. A given prompt is the same every time.
    """
    if prompt is not None:
        texts = [prompt]
    else:
        pool = itertools.cycle(TEXT.split())
        texts = [f"{name}.{index}: {' '.join(itertools.islice(pool, words))}" for index in range(count)]
    return [
        {"text_input": text, "max_tokens": max_tokens, "ignore_eos": True, "stream": True} for text in texts
    ]


@contextmanager
def target(
    url: str, model: str, deployment_file: Path | None, stages: int | None
) -> Iterator[tuple[str, str]]:
    """The server to drive and its model: the running one, or one that is started and stopped around it."""
    if deployment_file is None:
        yield url, model
        return
    deployment = with_overrides(
        load_deployment(deployment_file), stages=stages, http_port=0, grpc_port=0, metrics_port=0
    )
    server = ServerProcess(deployment, source=display(deployment_file))
    with err.status("starting the server") as line:
        try:
            server.start()
            server.wait_ready(progress=line.update)
            line.stop()
            yield server.endpoints.grpc, server.model_name
        finally:
            server.stop()


def warm_up(url: str, model: str) -> None:
    """Check that the server is ready and answers, before anything is measured."""
    with SkippyClient(url, model=model, timeout=120) as client:
        status = client.status()
        if not status.ready:
            raise ServerUnavailable(f"{url}: not ready: {status.reason}")
        client.generate("Warm", max_tokens=8, ignore_eos=True)


def report(levels: list[Level], max_tokens: int, model: str, json_file: Path | None) -> None:
    """Print the table and the errors, write the file; exits with 1 when requests failed."""
    figures = {"model": model, "max_tokens": max_tokens, "levels": [level.as_json() for level in levels]}
    written = json.dumps(figures, indent=2)
    if json_file == STDOUT:
        typer.echo(written)
    else:
        out.print(f"{model}, {max_tokens} tokens per answer, times in ms\n", markup=False)
        out.print(render(levels))
    for level in levels:
        for error in dict.fromkeys(level.errors):
            err.print(f"concurrency {level.concurrency}: {error}", style="red", markup=False, soft_wrap=True)
    if json_file is not None and json_file != STDOUT:
        json_file.write_text(written + "\n", encoding="utf-8")
    if any(level.errors for level in levels):
        raise typer.Exit(1)


def main() -> None:
    """Entry point."""
    run_script(load_test, "load_test")


if __name__ == "__main__":
    main()
