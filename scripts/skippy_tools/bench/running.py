"""How benchmarks run what they measure: in processes of its own, on one server at a time, with a progress bar."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from skippy_orchestrator.deployment import Deployment

from skippy_tools.bench.peers import installed, llama_cpp_f16
from skippy_tools.server import ServerProcess

T = TypeVar("T")

Advance = Callable[[str, int], None]
"""Shows the name of what is being measured, and so many more of the steps done."""


def with_stages(deployment: Deployment, stages: int) -> Deployment:
    """The same deployment in another number of stages, on free ports."""
    pipeline = msgspec.structs.replace(deployment.pipeline, stages=stages)
    server = msgspec.structs.replace(deployment.server, http_port=0, grpc_port=0, metrics_port=0, aliases=())
    return msgspec.structs.replace(deployment, pipeline=pipeline, stages=(), server=server)


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0))


def alone(function: Callable[..., T], *args: object) -> T:
    """Call in a process of its own: what a library finds or sets there (OpenMP above all) touches no other."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *args).result()


def transformers_or_not(console: Console) -> bool:
    """Whether transformers can be measured; says so if not."""
    if installed("transformers") and installed("accelerate"):
        return True
    console.print("left out: transformers is not installed (pip install '.[bench]')", markup=False)
    return False


def llama_cpp_or_not(model: Path, cache: Path, console: Console) -> Path | None:
    """The model as an F16 file for llama.cpp, converted on first use; says so where there can be none."""
    if not installed("llama_cpp"):
        console.print(
            "left out: llama.cpp is not installed (pip install '.[llama-cpp]'; compiles for minutes)",
            markup=False,
        )
    elif model.suffix != ".gguf":
        console.print("left out: llama.cpp needs a GGUF file, the deployment's model is a folder")
    else:
        return llama_cpp_f16(model, cache / f"{model.stem}.F16.gguf")
    return None


@dataclass(frozen=True, slots=True)
class Task(Generic[T]):
    """Something to measure once in every round."""

    once: Callable[[], T]
    rounds: int
    warm_up: Callable[[], object] | None = None
    """What is called beforehand instead of ``once``, where there is something shorter that does as well."""


def in_turns(tasks: Sequence[Task[T]]) -> list[list[T]]:
    """The results of every task's rounds, after a round that doesn't count.

    Tasks take turns, so that a slow minute of the machine hits all of them.
    """
    for task in tasks:
        (task.warm_up or task.once)()
    results: list[list[T]] = [[] for _ in tasks]
    for number in range(max((task.rounds for task in tasks), default=0)):
        for task, result in zip(tasks, results, strict=True):
            if number < task.rounds:
                result.append(task.once())
    return results


class ServerPool:
    """At most one running server: the one before is stopped when another deployment is asked for."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._server: ServerProcess | None = None

    def get(self, deployment: Deployment) -> ServerProcess:
        """The deployment's server, ready."""
        if self._server is None or self._server.deployment != deployment:
            self._stop()
            self._server = self._running.enter_context(ServerProcess(deployment))
        return self._server

    def _stop(self) -> None:
        self._server = None
        self._running.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()


@contextmanager
def progress(console: Console, total: int) -> Iterator[Advance]:
    """A bar of so many steps, gone at the end."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda name, steps: bar.update(task, description=name, advance=steps)
