"""The rules of spec 3.2, 3.4 and 3.5 said a second time, plainly: what the package is held against.

Everything is computed anew from the whole history, so nothing here can keep a wrong state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Observe:
    compute: float
    write: float
    wait: float


@dataclass(frozen=True)
class Calibrate:
    rate: float


@dataclass(frozen=True)
class Ramp:
    fixed: int
    start: int
    step: int
    most: int
    target: float


def planned(ramp: Ramp, history: Sequence[Observe | Calibrate]) -> tuple[int, int | None]:
    """The next size, and the ceiling (None: not calibrated), after a history."""
    size, ceiling = ramp.start, None
    for event in history:
        if isinstance(event, Calibrate):
            if math.isfinite(event.rate) and event.rate > 0:
                tokens = ramp.target / event.rate
                wanted = math.floor(tokens) if math.isfinite(tokens) else ramp.start
                stepped = ramp.start + math.floor(max(wanted - ramp.start, 0) // ramp.step) * ramp.step
                ceiling = max(ramp.start, min(stepped, ramp.most))
        else:
            compute = max(event.compute, 0.001)
            hidden = event.wait <= 0.75 * compute and event.write <= 0.25 * compute
            exposed = event.wait > 1.25 * compute or event.write > 0.75 * compute
            if hidden:
                size = min(size + ramp.step, ramp.most)
            elif exposed:
                size = max(size - ramp.step, ramp.start)
        if ceiling is not None:
            size = min(size, ceiling)
    return size, ceiling


def chunk_size(ramp: Ramp, history: Sequence[Observe | Calibrate], index: int, total: int) -> int:
    """Size of a chunk after a history."""
    if index == 0 and total <= ramp.fixed:
        return ramp.fixed
    return planned(ramp, history)[0]


def chunks(
    n_prompt: int, sizes: Sequence[int], rooms: Sequence[int], start: int, boundaries: Sequence[int]
) -> list[tuple[int, int, bool]]:
    """All chunks of a prompt, given what the planner and the frame would allow each of them (spec 3.1, 3.4).

    The last prompt token joins the chunk before it where there is room, unless a boundary keeps it apart.
    """
    found: list[tuple[int, int, bool]] = []
    total, position = n_prompt - 1, start
    for size, room in zip(sizes, rooms, strict=True):
        if position == n_prompt:
            break
        rows = range(position, min(position + min(size, room), total))
        cuts = [b for b in boundaries if start < b < n_prompt and position < b <= position + len(rows)]
        end = min(cuts) if cuts else position + len(rows)
        apart = total in cuts and position < total
        last = end == total and n_prompt - position <= room and not apart
        found.append((position, n_prompt if last else end, last))
        position = found[-1][1]
    return found


@dataclass(frozen=True)
class Prefilled:
    """One prefill as the pool is told of it: stage 0, then what other stages said (milliseconds)."""

    compute: float
    tokens: int
    write: float
    wait: float
    later_stage: int = 0
    later_compute: float = 0.0
    later_tokens: int = 0
    later_write: float = 0.0
    later_wait: float = 0.0

    @property
    def slowest(self) -> tuple[float, int, int]:
        """Compute time, tokens, stage."""
        own = (self.compute, self.tokens, 0)
        if not self.later_tokens:
            return own
        later = (self.later_compute, self.later_tokens, self.later_stage)
        return later if later[0] / later[1] > own[0] / own[1] else own

    def means(self) -> dict[str, float]:
        """What is smoothed."""
        compute, tokens, _ = self.slowest
        compute = max(compute, 0.001)
        write, wait = max(self.write, self.later_write), max(self.wait, self.later_wait)
        return {
            "write_ms": write,
            "wait_ms": wait,
            "slowest_compute_ms": compute,
            "slowest_compute_ms_per_token": compute / tokens,
            "write_to_compute": write / compute,
            "wait_to_compute": wait / compute,
        }


def smoothed(prefills: Sequence[Prefilled]) -> dict[str, float]:
    """The pool's means after some prefills: the first counts in full, each later one a quarter."""
    told = [p.means() for p in prefills if p.tokens]
    means = dict(told[0]) if told else {}
    for new in told[1:]:
        means = {key: 0.75 * means[key] + 0.25 * new[key] for key in means}
    return means
