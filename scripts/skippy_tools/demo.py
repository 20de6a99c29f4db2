"""``./scripts/demo``: one streamed chat answer from a real server, from nothing to nothing."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from skippy_client import Message, SkippyClient
from skippy_client import SkippyError as ClientError
from skippy_orchestrator.deployment import load_deployment
from skippy_stage.errors import SkippyError

from skippy_tools.command import run_script
from skippy_tools.paths import DEFAULT_DEPLOYMENT, display
from skippy_tools.serve import Stops, fail, start_visibly, with_overrides
from skippy_tools.server import ServerProcess, StoppedError

console = Console(highlight=False)


def demo(
    prompt: Annotated[
        str, typer.Option(help="What to ask.")
    ] = "Explain in three sentences why the sky is blue.",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of the answer.")] = 96,
    stages: Annotated[int, typer.Option(min=1, help="Pipeline stages that the model is cut into.")] = 2,
) -> None:
    """Start a server on free ports, stream one chat answer of a small model, and stop the server.

    Examples:

      ./scripts/demo

      ./scripts/demo --stages 3 --prompt "Write a haiku about rivers" --max-tokens 40
    """
    stops = Stops()
    server = None
    try:
        deployment = with_overrides(
            load_deployment(DEFAULT_DEPLOYMENT), stages=stages, http_port=0, grpc_port=0, metrics_port=0
        )
        server = ServerProcess(deployment, source=display(DEFAULT_DEPLOYMENT))
        start_visibly(server, stops)
        answer(server, stops, prompt, max_tokens)
    except StoppedError:
        raise typer.Exit(130) from None
    except SkippyError as error:
        fail(error)
    except ClientError as error:
        fail(SkippyError(str(error)))
    finally:
        if server is not None:
            server.stop()


def answer(server: ServerProcess, stops: Stops, prompt: str, max_tokens: int) -> None:
    """Stream one answer to the terminal, then show what it cost."""
    stages = len(server.status().stages)
    console.print(f"\n[bold]{server.model_name}[/bold], {stages} {'stage' if stages == 1 else 'stages'}")
    console.print(f"> {prompt}\n", markup=False)
    started = time.monotonic()
    first = last = 0.0
    tokens = prompt_tokens = 0
    reason = ""
    messages: list[Message] = [{"role": "user", "content": prompt}]
    with (
        SkippyClient(server.endpoints.grpc, model=server.model_name, timeout=300) as client,
        client.stream(messages=messages, max_tokens=max_tokens) as stream,
    ):
        for chunk in stream:
            if stops.asked():
                raise StoppedError("stopped while answering")
            console.file.write(chunk.text)
            console.file.flush()
            prompt_tokens = chunk.num_input_tokens or prompt_tokens
            reason = chunk.finish_reason or reason
            if chunk.token_ids:
                last = time.monotonic()
                first = first or last
                tokens += len(chunk.token_ids)
    if not tokens:
        raise SkippyError("the answer has no tokens")
    table = Table.grid(padding=(0, 2))
    table.add_row("prompt", f"{prompt_tokens} tokens")
    table.add_row("answer", f"{tokens} tokens, finish reason {reason}")
    table.add_row("first token", f"{(first - started) * 1000:.0f} ms")
    if last > first:
        table.add_row("then", f"{(tokens - 1) / (last - first):.1f} tokens/s")
    console.print("\n")
    console.print(table)


def main() -> None:
    """Entry point of ./scripts/demo."""
    run_script(demo, "demo")


if __name__ == "__main__":
    main()
