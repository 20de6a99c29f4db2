"""``./scripts/train_mtp_head``: chats, training, and what came of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from skippy_orchestrator.deployment import ModelSection
from skippy_stage.engines import prepare_environment
from skippy_stage.errors import SkippyError
from skippy_stage.weights import locate, open_checkpoint

from skippy_tools.command import run_script
from skippy_tools.paths import HEAD_FILE

console = Console(stderr=True, highlight=False)

DEPTH = 2


def train_mtp_head(
    model: Annotated[
        str, typer.Option(help="The model, as model.path of a deployment.")
    ] = ModelSection().path,
    out: Annotated[Path, typer.Option(help="File that the head is written to.")] = HEAD_FILE,
    rows: Annotated[
        int, typer.Option(min=2000, help="Tokens of chat that the model writes first.")
    ] = 250_000,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of training after that.")] = 14.0,
    vocabulary: Annotated[int, typer.Option(min=64, help="Tokens that the head can draft.")] = 8192,
    corpus: Annotated[
        Path | None, typer.Option(help="Keep the chats in this file, or take them from there.")
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(help="Begin with this head, trained here before, not with the model's last layer."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the chats and of training.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few minutes in all, to see that it works.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Train a multi-token prediction head for a model that has none, on chats that it writes itself.

    The model writes chats; a layer of its own shape learns to draft what it predicts, two drafts deep. A tenth of
    the chats is kept apart for measuring. With the defaults it takes half an hour on two cores.

    Examples:

      ./scripts/train_mtp_head --quick --out /tmp/head.safetensors

      ./scripts/train_mtp_head --corpus /tmp/chats.npz
    """
    prepare_environment()
    import torch

    from skippy_tools.mtp_training.corpus import ChatWriter, Corpus, frequent_tokens
    from skippy_tools.mtp_training.head import TrainedHead
    from skippy_tools.mtp_training.training import measure, train

    if quick:
        rows, minutes = min(rows, 12_000), min(minutes, 1.0)
    try:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bars:
            if corpus is not None and corpus.exists():
                chats = Corpus.load(corpus)
            else:
                writing = bars.add_task("the model writes chats", total=rows)
                chats = ChatWriter(model, seed).write(rows, lambda count: bars.advance(writing, count))
                if corpus is not None:
                    chats.save(corpus)
            learned, held_out = chats.split(0.1)
            checkpoint = open_checkpoint(locate(model))
            torch.manual_seed(seed)
            if start is not None:
                head = TrainedHead.load(start, checkpoint)
            else:
                tokens = frequent_tokens(
                    [learned.tokens, learned.predicted], vocabulary, checkpoint.config.vocab_size
                )
                head = TrainedHead(checkpoint, tokens)
            training = bars.add_task("the head learns", total=1.0)

            def progress(done: float, loss: float) -> None:
                bars.update(training, completed=done, description=f"the head learns (loss {loss:.2f})")

            steps = train(head, learned, minutes, DEPTH, seed, progress)
            bars.update(training, completed=1.0)
        head.save(out)
        measured = measure(head, held_out, 3)
    except (SkippyError, ValueError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    figures = {
        "out": str(out),
        "bytes": out.stat().st_size,
        "rows": len(chats.tokens),
        "steps": steps,
        **asdict(measured),
    }
    if as_json:
        print(json.dumps(figures))
        return
    table = Table(
        "on chats kept apart, greedy answers", "", title=f"{out} ({out.stat().st_size / 1e6:.1f} MB)"
    )
    for place, share in enumerate(measured.right_by_position, 1):
        table.add_row(f"right up to draft {place}", f"{share:.0%}")
    table.add_row(f"tokens per window of {measured.drafts} drafts", f"{measured.tokens_per_window:.2f}")
    table.add_row("the same with n-grams", f"{measured.ngram_tokens_per_window:.2f}")
    Console(highlight=False).print(table)


def main() -> None:
    """Entry point of ./scripts/train_mtp_head."""
    run_script(train_mtp_head, "train_mtp_head")


if __name__ == "__main__":
    main()
