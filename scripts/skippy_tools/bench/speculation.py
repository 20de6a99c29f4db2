"""``bench speculation``: decode rates by prompt kind, proposer, depth, stages, concurrency and link delay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from skippy_orchestrator.deployment import Deployment
from skippy_orchestrator.text.tokenizer import TextModel
from skippy_stage.weights import locate, open_checkpoint

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
from skippy_tools.bench.speculation_peers import llama_cpp_rates, transformers_rates
from skippy_tools.bench.speculation_plan import SERIAL, Plan, Way, deployment_of, prompts_of, ways
from skippy_tools.bench.speculation_rows import Setting, SpeculationRow, row_of
from skippy_tools.bench.speculation_server import SpeculationServer
from skippy_tools.bench.workload import Tokens

MODELLED: Final = "skippy_tools.bench.modelled:create"
SLOW_STAGES: Final = 4
SLOW_DEPTHS: Final = (1, 4)
WARM_UP_TOKENS: Final = 8

Case = tuple[str, Callable[[], list[SpeculationRow]]]


def run_speculation(
    deployment: Deployment, plan: Plan, head: Path | None, cache: Path, console: Console
) -> list[SpeculationRow]:
    """Measure peers, then the server; serial decoding takes turns with whatever is compared with it."""
    model = locate(deployment.model.path)
    text = TextModel.load(model)
    kinds = dict.fromkeys((*plan.kinds, "copy"))
    prompts = {kind: prompts_of(kind, text, max(plan.concurrency)) for kind in kinds}
    has_head = head is not None or open_checkpoint(model).config.mtp_layers > 0
    rows: list[SpeculationRow] = []
    with ServerPool() as pool:
        firsts = {kind: prompts[kind][0] for kind in plan.kinds}
        parts: dict[str, Iterator[Case]] = {
            "peers": _peers(model, firsts, plan, cache, console),
            "server": _servers(deployment, plan, prompts, head, pool, has_head=has_head),
            "links": _slow_links(deployment, plan, prompts, pool),
        }
        cases = [case for part in plan.parts for case in parts[part]]
        with progress(console, len(cases)) as advance:
            for name, run in cases:
                advance(name, 0)
                rows += run()
                advance(name, 1)
    return rows


def _peers(
    model: Path, prompts: dict[str, Tokens], plan: Plan, cache: Path, console: Console
) -> Iterator[Case]:
    rounds = max(1, plan.rounds // 2)
    if transformers_or_not(console):
        yield "transformers", partial(_peer_rows, transformers_rates, model, prompts, plan.tokens, rounds)
    f16 = llama_cpp_or_not(model, cache, console)
    if f16 is not None:
        yield "llama.cpp", partial(_peer_rows, llama_cpp_rates, f16, prompts, plan.tokens, rounds, cores())


def _peer_rows(rates: Callable[..., object], *args: object) -> list[SpeculationRow]:
    results = alone(rates, *args)
    if not isinstance(results, dict):
        raise TypeError(f"rates by subject and kind, got {type(results).__name__}")
    rows = []
    for (subject, kind), samples in results.items():
        base = subject.rsplit("_", 1)[0] if subject.endswith(("_lookup", "_assisted")) else subject
        proposer = subject.removeprefix(base).lstrip("_") or "off"
        serial = results[base, kind] if base != subject else None
        rows.append(row_of(Setting(subject, kind, proposer), samples, serial))
    return rows


def _servers(
    deployment: Deployment,
    plan: Plan,
    prompts: dict[str, tuple[Tokens, ...]],
    head: Path | None,
    pool: ServerPool,
    *,
    has_head: bool,
) -> Iterator[Case]:
    for stages in plan.stages:
        made = deployment_of(deployment, stages, 0.0, head)
        for concurrency in plan.concurrency:
            for kind in plan.kinds:
                base = Setting("server", kind, "off", stages=stages, concurrency=concurrency)
                chosen = ways(plan.depths, head=has_head)
                name = f"{kind}, {stages} stages, {concurrency} at a time"
                yield name, partial(_measure, made, plan, base, prompts[kind][:concurrency], chosen, pool)


def _slow_links(
    deployment: Deployment, plan: Plan, prompts: dict[str, tuple[Tokens, ...]], pool: ServerPool
) -> Iterator[Case]:
    """Copy prompts on four stages, each depth with all window widths; with modelled and with real compute."""
    chosen = [SERIAL, *(Way("ngram", depth, width) for depth in SLOW_DEPTHS for width in plan.widths)]
    for delay in plan.delays_ms:
        real = deployment_of(deployment, SLOW_STAGES, delay, None)
        pipeline = msgspec.structs.replace(real.pipeline, engine=MODELLED)
        modelled = msgspec.structs.replace(real, pipeline=pipeline)
        for subject, made in (("server_modelled", modelled), ("server", real)):
            base = Setting(subject, "copy", "off", stages=SLOW_STAGES, link_delay_ms=delay)
            name = f"{subject}, {delay:g} ms per link"
            yield name, partial(_measure, made, plan, base, prompts["copy"][:1], chosen, pool)


def _measure(
    deployment: Deployment,
    plan: Plan,
    base: Setting,
    prompts: tuple[Tokens, ...],
    chosen: list[Way],
    pool: ServerPool,
) -> list[SpeculationRow]:
    with SpeculationServer(pool.get(deployment)) as server:
        measure = partial(server.measure, base.prompt_kind, prompts)
        tasks = [
            Task(partial(measure, plan.tokens, way), plan.rounds, partial(measure, WARM_UP_TOKENS, way))
            for way in chosen
        ]
        results = in_turns(tasks)
    rows = []
    for way, samples in zip(chosen, results, strict=True):
        setting = Setting(
            *(base.subject, base.prompt_kind, way.proposer, way.depth, way.window),
            *(base.stages, base.concurrency, base.link_delay_ms),
        )
        rows.append(row_of(setting, samples, results[0] if way is not SERIAL else None))
    return rows
