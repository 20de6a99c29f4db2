"""``bench decode``: serial and batched decoding of the same weights, peers and ours in one run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from skippy_orchestrator.deployment import Deployment
from skippy_stage.weights import locate

from skippy_tools.bench.ours import InProcess, Server, with_stages
from skippy_tools.bench.peers import LlamaCpp, Transformers, installed, llama_cpp_f16
from skippy_tools.bench.rows import DecodeRow, Sample, median_row
from skippy_tools.bench.workload import Workload, make_workload
from skippy_tools.server import ServerProcess

STAGES = (1, 2, 3)
CONCURRENCY = (1, 4, 16)


class Subject(Protocol):
    """Something that is measured, loaded and warm after its first round."""

    subject: str
    concurrency: int

    def measure(self) -> Sample:
        """One round."""
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run."""

    rounds: int
    decode_tokens: int
    prompt_tokens: int
    long_tokens: int


FULL = Plan(rounds=5, decode_tokens=64, prompt_tokens=64, long_tokens=1000)
QUICK = Plan(rounds=2, decode_tokens=20, prompt_tokens=32, long_tokens=256)


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be: how to load its subject."""

    subject: str
    stages: int
    concurrency: int
    load: Callable[[ExitStack], Subject]


def run_decode(deployment: Deployment, plan: Plan, cache: Path, console: Console) -> list[DecodeRow]:
    """Measure every case in turn: one warm-up, then ``plan.rounds`` rounds; returns medians.

    A peer that is not installed is left out, and said so.
    """
    model = locate(deployment.model.path)
    work = make_workload(
        model,
        sequences=max(CONCURRENCY),
        prompt_tokens=plan.prompt_tokens,
        long_tokens=plan.long_tokens,
        decode_tokens=plan.decode_tokens,
    )
    cases = [*_peers(model, work, cache, console), *_ours(deployment, work)]
    rows: list[DecodeRow] = []
    with _progress(console, len(cases) * (plan.rounds + 1)) as advance, ExitStack() as servers:
        for case in cases:
            with ExitStack() as resources:
                name = f"{case.subject} stages={case.stages} concurrency={case.concurrency}"
                advance(name, 0)
                subject = case.load(servers if case.subject == "server" else resources)
                resources.callback(subject.close)
                samples = []
                for _ in range(plan.rounds + 1):
                    samples.append(subject.measure())
                    advance(name, 1)
            rows.append(
                median_row(
                    case.subject,
                    case.stages,
                    case.concurrency,
                    samples[1:],
                    decode_tokens=plan.decode_tokens,
                    prompt_tokens=plan.prompt_tokens,
                )
            )
    return rows


def _peers(model: Path, work: Workload, cache: Path, console: Console) -> Iterator[Case]:
    threads = len(os.sched_getaffinity(0))
    if installed("transformers") and installed("accelerate"):
        yield Case("transformers", 1, 1, _ignoring_stack(Transformers, model, work))
    else:
        console.print("left out: transformers is not installed (pip install '.[bench]')")
    if not installed("llama_cpp"):
        console.print(
            "left out: llama.cpp is not installed (pip install '.[llama-cpp]'; compiles for minutes)"
        )
    elif model.suffix != ".gguf":
        console.print("left out: llama.cpp needs a GGUF file, the deployment's model is a folder")
    else:
        f16 = llama_cpp_f16(model, cache / f"{model.stem}.F16.gguf")
        for concurrency in CONCURRENCY:
            load = _ignoring_stack(LlamaCpp, f16, work, concurrency, threads)
            yield Case("llama_cpp_f16", 1, concurrency, load)


def _ours(deployment: Deployment, work: Workload) -> Iterator[Case]:
    for stages in STAGES:
        cut = with_stages(deployment, stages)
        for concurrency in CONCURRENCY:
            yield Case("in_process", stages, concurrency, _ignoring_stack(InProcess, cut, work, concurrency))
    for stages in STAGES:
        shared = _SharedServer(with_stages(deployment, stages))
        for concurrency in CONCURRENCY:
            yield Case("server", stages, concurrency, partial(_load_server, shared, work, concurrency))


def _ignoring_stack(make: Callable[..., Subject], *args: object) -> Callable[[ExitStack], Subject]:
    return lambda stack: make(*args)


def _load_server(shared: _SharedServer, work: Workload, concurrency: int, stack: ExitStack) -> Subject:
    return Server(shared.get(stack), work, concurrency)


class _SharedServer:
    """One server for all concurrencies of a stage count; the one before it is stopped first."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._server: ServerProcess | None = None

    def get(self, stack: ExitStack) -> ServerProcess:
        """The server, started when it is first asked for; it ends with ``stack`` or with the next one."""
        if self._server is None:
            stack.close()
            self._server = stack.enter_context(ServerProcess(self._deployment))
        return self._server


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda name, steps: progress.update(task, description=name, advance=steps)
