"""What a load test found: from perf_analyzer's requests to figures, and their table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from rich.table import Table

PERCENTILES: Final = (50, 90, 99)
NS_PER_S: Final = 1e9
NS_PER_MS: Final = 1e6


@dataclass(frozen=True)
class Level:
    """The figures of one concurrency.

    Time to first token is from sending a request to its first response with a token. Inter-token
    latency is a request's (end - first token) / (tokens - 1). Throughput is over the time from the
    first request's start to the last response, so the ramp at both ends counts.
    """

    concurrency: int
    requests: int
    errors: tuple[str, ...]
    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_per_s: float = 0.0
    requests_per_s: float = 0.0
    ttft_ms: Mapping[str, float] = field(default_factory=dict)
    itl_ms: Mapping[str, float] = field(default_factory=dict)
    latency_ms: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain values for --json."""
        return asdict(self)


@dataclass(frozen=True)
class _Request:
    started: int
    first_token: int
    ended: int
    input_tokens: int
    output_tokens: int


def summarize(concurrency: int, exported: Sequence[Mapping[str, Any]], errors: Sequence[str]) -> Level:
    """The figures of the exported requests; those that break the protocol count as errors."""
    complaints = list(errors)
    good = []
    for request in exported:
        checked = _check(request)
        if isinstance(checked, str):
            complaints.append(checked)
        else:
            good.append(checked)
    if not good:
        return Level(concurrency, 0, tuple(complaints))
    seconds = (max(each.ended for each in good) - min(each.started for each in good)) / NS_PER_S
    tokens = sum(each.output_tokens for each in good)
    return Level(
        concurrency=concurrency,
        requests=len(good),
        errors=tuple(complaints),
        seconds=seconds,
        input_tokens=sum(each.input_tokens for each in good),
        output_tokens=tokens,
        output_tokens_per_s=tokens / seconds,
        requests_per_s=len(good) / seconds,
        ttft_ms=_spread([(each.first_token - each.started) / NS_PER_MS for each in good]),
        itl_ms=_spread(
            [
                (each.ended - each.first_token) / NS_PER_MS / (each.output_tokens - 1)
                for each in good
                if each.output_tokens > 1
            ]
        ),
        latency_ms=_spread([(each.ended - each.started) / NS_PER_MS for each in good]),
    )


def _check(request: Mapping[str, Any]) -> _Request | str:
    """The request's times and counts, or what is wrong with it."""
    responses = request["response_outputs"]
    times = request["response_timestamps"]
    if len(responses) != len(times):
        return f"{len(responses)} responses at {len(times)} times"
    finals = [index for index, response in enumerate(responses) if response.get("finish_reason")]
    if finals != [len(responses) - 1]:
        return f"{len(finals)} responses with a finish_reason, expected one, the last of {len(responses)}"
    counts = [int(response.get("num_output_tokens", 0)) for response in responses]
    first = next((index for index, count in enumerate(counts) if count), None)
    if first is None:
        return "an answer without tokens"
    return _Request(
        started=int(request["timestamp"]),
        first_token=int(times[first]),
        ended=int(times[-1]),
        input_tokens=int(responses[-1].get("num_input_tokens", 0)),
        output_tokens=sum(counts),
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean": float(np.mean(values)),
        **{f"p{rank}": float(np.percentile(values, rank)) for rank in PERCENTILES},
    }


def render(levels: Sequence[Level]) -> Table:
    """The table of all levels."""
    # Fits a terminal of 80 columns.
    table = Table(header_style="bold", box=None, pad_edge=False, collapse_padding=True)
    spreads = [f"{name}\np{rank}" for name in ("TTFT", "ITL") for rank in PERCENTILES]
    for name in ("concur-\nrency", "requests", "errors", *spreads, "output\ntok/s", "req/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for level in levels:
        failed = f"[red]{len(level.errors)}[/red]" if level.errors else "0"
        figures = [_figure(level.ttft_ms, rank) for rank in PERCENTILES]
        figures += [_figure(level.itl_ms, rank) for rank in PERCENTILES]
        rates = (
            ("-", "-")
            if not level.requests
            else (_shown(level.output_tokens_per_s), f"{level.requests_per_s:.2f}")
        )
        table.add_row(str(level.concurrency), str(level.requests), failed, *figures, *rates)
    return table


def _figure(spread: Mapping[str, float], rank: int) -> str:
    value = spread.get(f"p{rank}")
    return "-" if value is None else _shown(value)


def _shown(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"
