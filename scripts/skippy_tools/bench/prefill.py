"""``bench prefill``: time to first token by prompt length, stages, chunk policy and what is cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from skippy_orchestrator.deployment import Deployment
from skippy_stage.weights import locate

from skippy_tools.bench.peers import LLAMA_CPP_BATCH, LlamaCppModel, TransformersModel
from skippy_tools.bench.prefill_plan import WARM_UP_TOKENS, Plan, Prompts, Variant, make_variants
from skippy_tools.bench.prefill_rows import COLD, PrefillRow, Sample, Setting, rows_of
from skippy_tools.bench.prefill_server import Measured, PrefillServer
from skippy_tools.bench.running import (
    ServerPool,
    Task,
    alone,
    cores,
    in_turns,
    llama_cpp_or_not,
    progress,
    transformers_or_not,
)
from skippy_tools.bench.workload import Tokens

T = TypeVar("T")

Case = tuple[str, Callable[[], list[PrefillRow]]]
"""A name for the progress bar, and what measures some rows."""


def run_prefill(deployment: Deployment, plan: Plan, cache: Path, console: Console) -> list[PrefillRow]:
    """Measure peers and servers in turn, each after rounds that don't count; returns medians.

    A peer that is not installed is left out, and said so.
    """
    model = locate(deployment.model.path)
    prompts = Prompts.make(model, plan, console)
    rows: list[PrefillRow] = []
    with ServerPool() as pool:
        cases = [
            *_peers(model, prompts, plan, cache, console),
            *_servers(make_variants(deployment, plan), prompts, plan, pool),
        ]
        with progress(console, len(cases)) as advance:
            for name, run in cases:
                advance(name, 0)
                rows += run()
                advance(name, 1)
    return rows


def _peers(model: Path, prompts: Prompts, plan: Plan, cache: Path, console: Console) -> Iterator[Case]:
    given = [(prompts.by_length[length], plan.rounds_of(length)) for length in plan.lengths]
    if transformers_or_not(console):
        setting = Setting(TransformersModel.subject, 1, "whole", cores())
        yield setting.subject, partial(_measure_peer, setting, TransformersModel, (model,), given)
    f16 = llama_cpp_or_not(model, cache, console)
    if f16 is not None:
        setting = Setting(LlamaCppModel.subject, 1, f"fixed:{LLAMA_CPP_BATCH}", cores())
        args = (f16, max(plan.lengths) + 64, 1, cores())
        yield setting.subject, partial(_measure_peer, setting, LlamaCppModel, args, given)


def _measure_peer(
    setting: Setting,
    make: Callable[..., TransformersModel | LlamaCppModel],
    args: Sequence[object],
    given: Sequence[tuple[Tokens, int]],
) -> list[PrefillRow]:
    times = alone(_time_prompts, make, args, given)
    rounds = [
        [{COLD: Sample(len(prompt), seconds)} for seconds in measured]
        for (prompt, _), measured in zip(given, times, strict=True)
    ]
    return [row for each in rounds for row in rows_of(setting, each)]


def _time_prompts(
    make: Callable[..., TransformersModel | LlamaCppModel],
    args: Sequence[object],
    given: Sequence[tuple[Tokens, int]],
) -> list[list[float]]:
    """Seconds to the first token, for every prompt as often as it says."""
    peer = make(*args)
    try:
        return in_turns([_prompt_task(peer.first_token_s, prompt, rounds) for prompt, rounds in given])
    finally:
        peer.close()


def _servers(variants: Sequence[Variant], prompts: Prompts, plan: Plan, pool: ServerPool) -> Iterator[Case]:
    for variant in variants:
        yield variant.name, partial(_measure_variant, variant, prompts, plan, pool)


def _measure_variant(variant: Variant, prompts: Prompts, plan: Plan, pool: ServerPool) -> list[PrefillRow]:
    setting = Setting.of(variant.deployment)
    with PrefillServer(pool.get(variant.deployment)) as server:
        results = in_turns(_tasks(variant, server, prompts, plan))
    return [row for rounds in results for row in rows_of(setting, rounds)]


def _tasks(variant: Variant, server: PrefillServer, prompts: Prompts, plan: Plan) -> list[Task[Measured]]:
    measure = server.repeats if variant.repeats else server.cold
    tasks = [_prompt_task(measure, prompts.by_length[n], plan.rounds_of(n)) for n in variant.cold]
    if variant.shares and prompts.system is not None:
        tasks.append(Task(partial(server.system_prompt, prompts.system), plan.rounds))
    if variant.shares and prompts.conversation is not None:
        tasks.append(Task(partial(server.chat, prompts.conversation), plan.rounds))
    if variant.interference:
        beside = partial(server.interference, prompts.running, plan.quiet_tokens)
        tasks.append(_prompt_task(beside, prompts.by_length[plan.beside_tokens], plan.long_rounds))
    return tasks


def _prompt_task(measure: Callable[[Tokens], T], prompt: Tokens, rounds: int) -> Task[T]:
    return Task(partial(measure, prompt), rounds, partial(measure, prompt[:WARM_UP_TOKENS]))
