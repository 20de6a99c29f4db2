"""How large a chunk should be: the policies ``fixed``, ``schedule`` and ``adaptive-ramp`` (spec 3.2).

A ``PrefillPolicy`` is what a deployment says, checked once; ``planner()`` makes the state of one request.
The adaptive planner grows its chunks while computing hides the transport and shrinks them when it shows.

Invariants of the adaptive planner, after any sequence of observations and calibrations (I24):
``start <= next_size <= ceiling <= max``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from skippy_orchestrator.prefill.observations import COMPUTE_FLOOR_MS

if TYPE_CHECKING:  # for its type only, so that a deployment may check itself with a PrefillPolicy
    from skippy_orchestrator.deployment import PrefillSection

PolicyName: TypeAlias = Literal["fixed", "schedule", "adaptive-ramp"]

_NAMES: Final[dict[str, PolicyName]] = {
    "fixed": "fixed",
    "schedule": "schedule",
    "adaptive": "adaptive-ramp",
    "adaptive-ramp": "adaptive-ramp",
}

# Shares of a chunk's compute time (spec 3.2, 10.5). Up to the first pair the transport is hidden and chunks
# grow; beyond either of the second pair it is exposed and they shrink; between them nothing changes.
_HIDDEN_WAIT: Final = 0.75
_HIDDEN_WRITE: Final = 0.25
_EXPOSED_WAIT: Final = 1.25
_EXPOSED_WRITE: Final = 0.75

_MAX_DIGITS: Final = 18
"""Digits of one schedule item: what fits into 64 bits."""


class Planner(Protocol):
    """Chunk sizes of one request."""

    def chunk_size(self, index: int, total: int) -> int:
        """Tokens of chunk ``index`` of a prefill of ``total`` tokens, at least 1; changes nothing."""
        ...

    def observe(self, compute_ms: float, write_ms: float, wait_ms: float) -> None:
        """One chunk took this long to compute on stage 0, to write, and to wait for its credit."""
        ...

    def calibrate(self, ms_per_token: float) -> None:
        """The slowest stage takes this long for one token."""
        ...


class ScheduledPlanner:
    """Sizes known beforehand; the last one stays (policies ``fixed`` and ``schedule``). Learns nothing."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self._sizes = sizes

    def chunk_size(self, index: int, total: int) -> int:
        """The size at ``index``, or the last one."""
        return self._sizes[min(index, len(self._sizes) - 1)]

    def observe(self, compute_ms: float, write_ms: float, wait_ms: float) -> None:
        """No effect."""

    def calibrate(self, ms_per_token: float) -> None:
        """No effect."""


class AdaptivePlanner:
    """Sizes that follow the transport, under a ceiling for the duration of a chunk (``adaptive-ramp``)."""

    def __init__(self, policy: PrefillPolicy) -> None:
        self._policy = policy
        self._next_size = policy.adaptive_start
        self._ceiling = policy.adaptive_max

    @property
    def next_size(self) -> int:
        """Tokens of the next chunk, unless the whole prompt goes in one."""
        return self._next_size

    @property
    def ceiling(self) -> int:
        """Most tokens of a chunk: ``adaptive_max`` until a calibration sets less."""
        return self._ceiling

    def chunk_size(self, index: int, total: int) -> int:
        """The next size; a prompt of at most ``chunk_tokens`` goes in one chunk."""
        whole = self._policy.chunk_tokens
        return whole if index == 0 and total <= whole else self._next_size

    def observe(self, compute_ms: float, write_ms: float, wait_ms: float) -> None:
        """Grow by a step when computing hid the transport, shrink by one when it did not."""
        policy = self._policy
        compute_ms = max(compute_ms, COMPUTE_FLOOR_MS)
        if wait_ms <= _HIDDEN_WAIT * compute_ms and write_ms <= _HIDDEN_WRITE * compute_ms:
            self._next_size = min(self._next_size + policy.adaptive_step, self._ceiling)
        elif wait_ms > _EXPOSED_WAIT * compute_ms or write_ms > _EXPOSED_WRITE * compute_ms:
            self._next_size = max(self._next_size - policy.adaptive_step, policy.adaptive_start)

    def calibrate(self, ms_per_token: float) -> None:
        """Put the ceiling at whole steps above the start that the slowest stage does within the target."""
        if not math.isfinite(ms_per_token) or ms_per_token <= 0:
            return
        policy = self._policy
        start, step = policy.adaptive_start, policy.adaptive_step
        # A rate so small that the quotient overflows says nothing: the spec then takes the start.
        tokens = policy.adaptive_target_ms / ms_per_token
        above = max(math.floor(tokens) - start, 0) if math.isfinite(tokens) else 0
        self._ceiling = min(start + above // step * step, policy.adaptive_max)
        self._next_size = min(self._next_size, self._ceiling)


@dataclass(frozen=True, slots=True)
class PrefillPolicy:
    """What a deployment says about chunks (spec 3.2, 10.1), checked when it is made.

    Raises ValueError naming the field, its value and the limit. Adaptive values are checked for the
    adaptive policy alone, as only it reads them.
    """

    policy: str = "adaptive-ramp"
    """``fixed``, ``schedule``, ``adaptive`` or ``adaptive-ramp``; spaces around it and case do not matter."""
    schedule: str = ""
    """Chunk sizes in tokens, separated by commas; with one, ``fixed`` means ``schedule``."""
    chunk_tokens: int = 256
    """Tokens of a ``fixed`` chunk; the adaptive policy takes a prompt up to this size in one chunk."""
    adaptive_start: int = 128
    """Tokens of the first adaptive chunk, and the least of any."""
    adaptive_step: int = 128
    """Tokens by which adaptive chunks grow and shrink."""
    adaptive_max: int = 384
    """Most tokens of an adaptive chunk."""
    adaptive_target_ms: float = 100.0
    """Milliseconds that an adaptive chunk may take on the slowest stage, once its rate is known."""
    name: PolicyName = field(init=False)
    """The policy that results."""
    sizes: tuple[int, ...] = field(init=False)
    """The schedule in tokens; empty for other policies."""

    def __post_init__(self) -> None:
        _at_least_1("chunk_tokens", self.chunk_tokens)
        name = _NAMES.get(self.policy.strip().lower())
        if name is None:
            raise ValueError(f"policy: got {self.policy!r}, expected fixed, schedule or adaptive-ramp")
        sizes = parse_schedule(self.schedule)
        if name == "fixed" and sizes:
            name = "schedule"
        if name == "schedule" and not sizes:
            raise ValueError(
                f"schedule: got {self.schedule!r}, expected at least 1 size, which policy `schedule` requires"
            )
        if name == "adaptive-ramp":
            self._check_adaptive()
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "sizes", sizes if name == "schedule" else ())

    @classmethod
    def of(cls, section: PrefillSection) -> PrefillPolicy:
        """The policy of a deployment's section."""
        return cls(
            policy=section.policy,
            schedule=section.schedule,
            chunk_tokens=section.chunk_tokens,
            adaptive_start=section.adaptive_start,
            adaptive_step=section.adaptive_step,
            adaptive_max=section.adaptive_max,
            adaptive_target_ms=section.adaptive_target_ms,
        )

    def _check_adaptive(self) -> None:
        for key in ("adaptive_start", "adaptive_step", "adaptive_max"):
            _at_least_1(key, getattr(self, key))
        if self.adaptive_start > self.adaptive_max:
            raise ValueError(
                f"adaptive_start: got {self.adaptive_start}, expected at most adaptive_max, {self.adaptive_max}"
            )
        target = self.adaptive_target_ms
        if not math.isfinite(target) or target <= 0:
            raise ValueError(f"adaptive_target_ms: got {target}, expected a finite number above 0")

    @property
    def label(self) -> str:
        """The schedule's sizes joined by commas, for telemetry; empty for other policies (spec 3.2, 9.3)."""
        return ",".join(map(str, self.sizes))

    def planner(self) -> Planner:
        """A planner for one request."""
        if self.name == "adaptive-ramp":
            return AdaptivePlanner(self)
        return ScheduledPlanner(self.sizes or (self.chunk_tokens,))


def parse_schedule(text: str) -> tuple[int, ...]:
    """Chunk sizes from a comma-separated list; none from an empty text.

    Raises ValueError for an item that is empty, not a whole number, or 0.
    """
    if not text.strip():
        return ()
    sizes = []
    for item in map(str.strip, text.split(",")):
        # int() takes more than the spec's digits, and refuses endless ones with an error of its own.
        plain = item.isascii() and item.isdigit() and len(item) <= _MAX_DIGITS
        if not plain or int(item) < 1:
            raise ValueError(
                f"schedule: got {item!r} in {text!r}, "
                f"expected whole numbers of at least 1 and at most {_MAX_DIGITS} digits"
            )
        sizes.append(int(item))
    return tuple(sizes)


def _at_least_1(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}: got {value}, expected at least 1")
