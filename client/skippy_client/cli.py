"""The ``skippy`` command: generate, chat, status."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Annotated

import typer

from skippy_client.cli_chat import run_chat
from skippy_client.cli_output import TerminalWriter, describe_stats, note, print_error
from skippy_client.cli_status import show_status, watch_status
from skippy_client.errors import (
    GenerationCancelled,
    GenerationTimeout,
    InvalidRequest,
    ServerUnavailable,
    SkippyError,
)
from skippy_client.sync import GenerationStream, SkippyClient
from skippy_client.types import GenerateOptions, Generation, Message

EXIT_FAULT, EXIT_INPUT, EXIT_UNAVAILABLE, EXIT_TIMEOUT, EXIT_CANCELLED = 1, 2, 3, 124, 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    epilog="Exit status: 0 done, 2 bad input, 3 server unavailable or not ready, 124 timeout, 130 cancelled, "
    "1 anything else.",
)

Url = Annotated[str, typer.Option(help="Host and gRPC port of the server.", envvar="SKIPPY_URL")]
Model = Annotated[str, typer.Option(help="The orchestrator's model name or an alias.", envvar="SKIPPY_MODEL")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Temperature = Annotated[
    float | None, typer.Option("--temperature", "-t", help="0 is greedy; above 0 samples.")
]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens; 0 is off.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the most likely tokens of this total probability.")
]
MinP = Annotated[
    float | None, typer.Option(help="Leave out tokens below this fraction of the likeliest one's.")
]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="Text that ends the answer; may be given several times.")
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token, to --max-tokens.")]
CacheKey = Annotated[
    str | None, typer.Option(help="Share cached prompt prefixes only with requests of the same key.")
]
Timeout = Annotated[float | None, typer.Option(help="Seconds until giving up on an answer.", min=0.001)]
Speculation = Annotated[
    str | None,
    typer.Option(
        metavar="PLAN",
        help="How to guess ahead: off, a plan's name, limits such as window=4,depth=1, or a name and limits.",
        show_default=False,
    ),
]
Stats = Annotated[
    bool, typer.Option("--stats", "--verbose", "-v", help="Print tokens, times and rates to standard error.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end instead of the text.")]

DEFAULT_URL = "127.0.0.1:8001"
DEFAULT_MODEL = "skippy"


@app.callback()
def main() -> None:
    """Talk to a Skippy server.

    [bold]Examples[/bold]

      skippy generate "The capital of France is" --max-tokens 16

      skippy chat

      skippy status --watch

    The server is the one at 127.0.0.1:8001 unless --url or SKIPPY_URL says otherwise.
    """


@app.command()
def generate(
    prompt: Annotated[
        str,
        typer.Argument(
            metavar="PROMPT", help="Text to continue; - reads standard input.", show_default=False
        ),
    ],
    url: Url = DEFAULT_URL,
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    cache_key: CacheKey = None,
    speculation: Speculation = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    stats: Stats = False,
) -> None:
    """Continue a text, printed as it comes.

    [bold]Examples[/bold]

      skippy generate "Once upon a time" -n 64

      skippy generate "Once upon a time" -n 64 -t 0.8 --top-p 0.95 --seed 7 --stats

      skippy generate "1, 2, 3," --stop 7 --json --cache-key mine

      skippy generate - < prompt.txt
    """
    options = gather_options(
        max_tokens, temperature, top_k, top_p, min_p, seed, stop, ignore_eos, cache_key, speculation
    )
    with exit_codes(), SkippyClient(url, model=model, timeout=timeout) as client:
        text = sys.stdin.read() if prompt == "-" else prompt
        answer_once(client.stream(text, **options), as_json, stats)


@app.command()
def chat(
    message: Annotated[
        str | None,
        typer.Argument(
            metavar="[MESSAGE]", help="One message; left out, a conversation starts.", show_default=False
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message that opens the chat.")] = None,
    url: Url = DEFAULT_URL,
    model: Model = DEFAULT_MODEL,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    cache_key: CacheKey = None,
    speculation: Speculation = None,
    timeout: Timeout = None,
    as_json: AsJson = False,
    stats: Stats = False,
) -> None:
    """Chat with the model: one message, or a conversation that it remembers.

    In a conversation: /reset forgets it, /quit or Ctrl-D leaves, Ctrl-C stops the running answer. Messages
    may also come from a file, one a line; then the first failure ends it, with its exit status.

    [bold]Examples[/bold]

      skippy chat

      skippy chat --system "Answer in one sentence."

      skippy chat "Why is the sky blue?" -n 128 --stats

      skippy chat < questions.txt
    """
    options = gather_options(
        max_tokens, temperature, top_k, top_p, min_p, seed, stop, ignore_eos, cache_key, speculation
    )
    opening: list[Message] = [{"role": "system", "content": system}] if system else []
    with exit_codes(), SkippyClient(url, model=model, timeout=timeout) as client:
        if message is None:
            if as_json:
                raise InvalidRequest("--json needs a message: a conversation has no single answer")
            run_chat(client, opening, options, stats=stats)
        else:
            options["messages"] = [*opening, {"role": "user", "content": message}]
            answer_once(client.stream(**options), as_json, stats)


@app.command()
def status(
    url: Url = DEFAULT_URL,
    model: Model = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's report as JSON.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it until Ctrl-C.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.1)] = 1.0,
    wait: Annotated[
        float | None, typer.Option(help="Seconds to wait first until all stages are ready.", min=0)
    ] = None,
) -> None:
    """Show the server and its stages: readiness, layers, sessions, KV memory, work done, prefix cache.

    The exit status is 0 when all stages are ready, and 3 when not.

    [bold]Examples[/bold]

      skippy status

      skippy status --watch --interval 0.5

      skippy status --wait 60 --json
    """
    with exit_codes(), SkippyClient(url, model=model) as client:
        if watch and as_json:
            raise InvalidRequest("--json and --watch don't go together")
        if wait is not None:
            client.wait_ready(wait)
        if watch:
            watch_status(client, interval)
            return
        report = client.status()
        if as_json:
            typer.echo(json.dumps(report.raw, indent=2, ensure_ascii=False))
        else:
            show_status(report)
        if not report.ready:
            raise typer.Exit(EXIT_UNAVAILABLE)


def gather_options(
    max_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
    seed: int | None,
    stop: list[str] | None,
    ignore_eos: bool,
    cache_key: str | None,
    speculation: str | None,
) -> GenerateOptions:
    """The library's options from the command line's; what wasn't given stays the server's default."""
    return GenerateOptions(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop_words=stop,
        ignore_eos=ignore_eos or None,
        prompt_cache_key=cache_key,
        speculation=speculation,
    )


def answer_once(stream: GenerationStream, as_json: bool, stats: bool) -> None:
    """Print one answer, as text while it comes or as JSON at its end."""
    with stream:
        if as_json:
            generation = stream.result()
            typer.echo(json.dumps(as_report(generation), ensure_ascii=False))
        else:
            writer = TerminalWriter()
            for chunk in stream:
                writer.write(chunk.text)
            writer.end()
            generation = stream.result()
    if stats:
        note(describe_stats(generation))


def as_report(generation: Generation) -> dict[str, object]:
    """What ``--json`` prints."""
    return {**asdict(generation), "tokens_per_s": generation.tokens_per_s}


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turn our exceptions and Ctrl-C into a line on standard error and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_CANCELLED) from None
    except UnicodeDecodeError as error:
        print_error(f"standard input isn't {error.encoding}: {error.reason} at byte {error.start}")
        raise typer.Exit(EXIT_INPUT) from None
    except SkippyError as error:
        print_error(str(error))
        raise typer.Exit(exit_code(error)) from None


def exit_code(error: SkippyError) -> int:
    """The exit status for an exception of ours."""
    match error:
        case InvalidRequest():
            return EXIT_INPUT
        case ServerUnavailable():
            return EXIT_UNAVAILABLE
        case GenerationTimeout():
            return EXIT_TIMEOUT
        case GenerationCancelled():
            return EXIT_CANCELLED
        case _:
            return EXIT_FAULT
