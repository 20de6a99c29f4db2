"""``bench decode``: serial and batched decoding of the same weights, peers and ours in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from rich.console import Console
from skippy_orchestrator.deployment import Deployment
from skippy_stage.weights import locate

from skippy_tools.bench.decode_rows import DecodeRow, Sample, median_row
from skippy_tools.bench.ours import InProcess, Server
from skippy_tools.bench.peers import LlamaCpp, Transformers
from skippy_tools.bench.running import (
    ServerPool,
    Task,
    alone,
    cores,
    in_turns,
    llama_cpp_or_not,
    progress,
    transformers_or_not,
    with_stages,
)
from skippy_tools.bench.workload import Workload, make_workload

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
    with ServerPool() as pool:
        cases = [*_peers(model, work, cache, console), *_ours(deployment, work, pool)]
        with progress(console, len(cases)) as advance:
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
    if transformers_or_not(console):
        yield Case("transformers", 1, 1, partial(alone, _measure, Transformers, (model, work)))
    f16 = llama_cpp_or_not(model, cache, console)
    if f16 is not None:
        for concurrency in CONCURRENCY:
            run = partial(alone, _measure, LlamaCpp, (f16, work, concurrency, cores()))
            yield Case("llama_cpp_f16", 1, concurrency, run)


def _ours(deployment: Deployment, work: Workload, pool: ServerPool) -> Iterator[Case]:
    for stages in STAGES:
        cut = with_stages(deployment, stages)
        for concurrency in CONCURRENCY:
            run = partial(alone, _measure, InProcess, (cut, work, concurrency))
            yield Case("in_process", stages, concurrency, run)
    for stages in STAGES:
        cut = with_stages(deployment, stages)
        for concurrency in CONCURRENCY:
            run = partial(_measure_server, pool, cut, work, concurrency)
            yield Case("server", stages, concurrency, run)


def _measure(make: Callable[..., Subject], args: Sequence[object], rounds: int) -> list[Sample]:
    subject = make(*args)
    try:
        (samples,) = in_turns([Task(subject.measure, rounds)])
        return samples
    finally:
        subject.close()


def _measure_server(
    pool: ServerPool, cut: Deployment, work: Workload, concurrency: int, rounds: int
) -> list[Sample]:
    return _measure(Server, (pool.get(cut), work, concurrency), rounds)
