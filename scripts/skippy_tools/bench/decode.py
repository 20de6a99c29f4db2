"""``bench decode``: serial and batched decoding of the same weights, peers and ours in one run."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
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
    """One row to be, and how to measure it."""

    subject: str
    stages: int
    concurrency: int
    run: Callable[[int], list[Sample]]
    """Measure so many rounds, each with a sample."""


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
    rows: list[DecodeRow] = []
    with ExitStack() as servers:
        cases = [*_peers(model, work, cache, console), *_ours(deployment, work, servers)]
        with _progress(console, len(cases)) as advance:
            for case in cases:
                advance(f"{case.subject} stages={case.stages} concurrency={case.concurrency}", 0)
                samples = case.run(plan.rounds)
                advance(case.subject, 1)
                rows.append(
                    median_row(
                        case.subject,
                        case.stages,
                        case.concurrency,
                        samples,
                        decode_tokens=plan.decode_tokens,
                        prompt_tokens=plan.prompt_tokens,
                    )
                )
    return rows


def _peers(model: Path, work: Workload, cache: Path, console: Console) -> Iterator[Case]:
    threads = len(os.sched_getaffinity(0))
    if installed("transformers") and installed("accelerate"):
        yield Case("transformers", 1, 1, _alone(Transformers, model, work))
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
            run = _alone(LlamaCpp, f16, work, concurrency, threads)
            yield Case("llama_cpp_f16", 1, concurrency, run)


def _ours(deployment: Deployment, work: Workload, servers: ExitStack) -> Iterator[Case]:
    for stages in STAGES:
        cut = with_stages(deployment, stages)
        for concurrency in CONCURRENCY:
            yield Case("in_process", stages, concurrency, _alone(InProcess, cut, work, concurrency))
    for stages in STAGES:
        shared = _SharedServer(with_stages(deployment, stages), servers)
        for concurrency in CONCURRENCY:
            yield Case("server", stages, concurrency, partial(_measure_server, shared, work, concurrency))


def _alone(make: Callable[..., Subject], *args: object) -> Callable[[int], list[Sample]]:
    """Measure in a process of its own: what a library finds or sets there (OpenMP above all) touches no other."""

    def run(rounds: int) -> list[Sample]:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            return process.submit(_measure, make, args, rounds).result()

    return run


def _measure(make: Callable[..., Subject], args: Sequence[object], rounds: int) -> list[Sample]:
    subject = make(*args)
    try:
        return [subject.measure() for _ in range(rounds + 1)][1:]
    finally:
        subject.close()


def _measure_server(shared: _SharedServer, work: Workload, concurrency: int, rounds: int) -> list[Sample]:
    return _measure(Server, (shared.get(), work, concurrency), rounds)


class _SharedServer:
    """One server for all concurrencies of a stage count; the one before it is stopped first."""

    def __init__(self, deployment: Deployment, servers: ExitStack) -> None:
        self._deployment = deployment
        self._servers = servers
        self._server: ServerProcess | None = None

    def get(self) -> ServerProcess:
        """The server, started when it is first asked for; it ends with ``servers`` or with the next one."""
        if self._server is None:
            self._servers.close()
            self._server = self._servers.enter_context(ServerProcess(self._deployment))
        return self._server


@contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str, int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda name, steps: progress.update(task, description=name, advance=steps)
