"""The ratios that ``bench prefill`` prints: sentences made from rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skippy_tools.bench.prefill_rows import PrefillRow
from skippy_tools.bench.report import Ratios

PEERS = {"llama_cpp_f16": "llama.cpp F16", "transformers": "transformers"}
STAGES_BESIDE_PEERS = (1, 2)
LONG_TOKENS = 1000
"""Prompts from here on say something about rates; shorter ones are mostly the way to the server and back."""


@dataclass(frozen=True, slots=True)
class Own:
    """How the measured deployment is set up itself, as against the variants of it."""

    policy: str
    threads: int


def prefill_ratios(rows: Sequence[PrefillRow], own: Own) -> list[str]:
    """What a reader compares, as sentences; left out where a side was not measured."""
    said = Ratios()
    cold = [row for row in rows if row.scenario == "cold"]
    ours = [row for row in cold if row.subject == "server"]
    _add_lock_step(said, ours)
    _add_policies(said, ours, own)
    _add_peers(said, cold, own)
    _add_shares(said, rows)
    _add_gaps(said, [row for row in rows if row.scenario == "interference"])
    return said.lines


def _find(rows: Sequence[PrefillRow], **fields: Any) -> PrefillRow | None:
    """The first row with these values."""
    return next((r for r in rows if all(getattr(r, name) == value for name, value in fields.items())), None)


def _place(row: PrefillRow) -> dict[str, Any]:
    """What must be equal for two policies to be compared."""
    return {"stages": row.stages, "threads": row.threads, "prompt_tokens": row.prompt_tokens}


def _stages(row: PrefillRow) -> str:
    return f"{row.stages} {'stage' if row.stages == 1 else 'stages'}"


def _threads(row: PrefillRow) -> str:
    if not row.threads:
        return "shared cores"
    return f"{row.threads} {'thread' if row.threads == 1 else 'threads'} each"


def _add_lock_step(said: Ratios, ours: Sequence[PrefillRow]) -> None:
    pipelined = [row for row in ours if row.policy != "lock-step"]
    for slow in ours:
        fast = _find(pipelined, **_place(slow)) if slow.policy == "lock-step" else None
        if fast is not None:
            said.add(
                f"pipelined / lock-step, {_stages(slow)}, {_threads(slow)}, "
                f"prefill of {slow.prompt_tokens:,} tokens",
                fast.prompt_tokens_per_s,
                slow.prompt_tokens_per_s,
            )


def _add_policies(said: Ratios, ours: Sequence[PrefillRow], own: Own) -> None:
    for other in ours:
        row = _find(ours, policy=own.policy, **_place(other))
        if row is not None and other.policy not in (own.policy, "lock-step"):
            said.add(
                f"{own.policy} / {other.policy}, {_stages(row)}, prefill of {row.prompt_tokens:,} tokens",
                row.prompt_tokens_per_s,
                other.prompt_tokens_per_s,
            )


def _add_peers(said: Ratios, cold: Sequence[PrefillRow], own: Own) -> None:
    lengths = sorted({row.prompt_tokens for row in cold if row.prompt_tokens >= LONG_TOKENS})
    for tokens in lengths:
        for stages in STAGES_BESIDE_PEERS:
            place = {"stages": stages, "threads": own.threads, "prompt_tokens": tokens}
            row = _find(cold, subject="server", policy=own.policy, **place)
            for subject, name in PEERS.items():
                peer = _find(cold, subject=subject, prompt_tokens=tokens)
                if row is not None and peer is not None:
                    said.add(
                        f"server with {_stages(row)} / {name}, prefill of {tokens:,} tokens",
                        row.prompt_tokens_per_s,
                        peer.prompt_tokens_per_s,
                    )


def _add_shares(said: Ratios, rows: Sequence[PrefillRow]) -> None:
    for row in rows:
        if row.cache == "cold" or (row.cache == "full" and row.prompt_tokens < LONG_TOKENS):
            continue
        # A repeated prompt was cold before; the other scenarios bring a cold measurement of their own.
        scenario = "cold" if row.cache == "full" else row.scenario
        cold = _find(
            rows, subject=row.subject, policy=row.policy, scenario=scenario, cache="cold", **_place(row)
        )
        if cold is not None:
            said.add_share(
                f"{row.scenario}, {_stages(row)}, {row.cached_tokens:,} of {row.prompt_tokens:,} tokens cached",
                row.ttft_ms,
                cold.ttft_ms,
                "the cold TTFT",
            )


def _add_gaps(said: Ratios, beside: Sequence[PrefillRow]) -> None:
    for row in beside:
        if row.gaps and row.quiet_gaps:
            bound = row.prefill_rows_while_decoding
            said.add(
                f"p95 token gap beside a prompt / without one, {f'bound {bound} rows' if bound else 'no bound'}",
                row.gaps.p95_ms,
                row.quiet_gaps.p95_ms,
            )
    free = _find(beside, prefill_rows_while_decoding=0)
    bounded = next((row for row in beside if row.prefill_rows_while_decoding), None)
    if free and free.gaps and bounded and bounded.gaps:
        name = f"bound {bounded.prefill_rows_while_decoding} rows / none"
        said.add(f"{name}, p95 token gap beside a prompt", bounded.gaps.p95_ms, free.gaps.p95_ms)
        said.add(f"{name}, longest token gap beside a prompt", bounded.gaps.max_ms, free.gaps.max_ms)
        said.add(f"{name}, TTFT of the prompt", bounded.ttft_ms, free.ttft_ms)
