"""The rows of ``bench prefill``: what is measured of a prompt, and how rounds become a row."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from skippy_orchestrator.deployment import Deployment, PrefillSection
from skippy_stage.errors import SkippyError


@dataclass(frozen=True, slots=True)
class Gaps:
    """Times in ms between two responses of running streams, over all streams and rounds."""

    median_ms: float
    p95_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One measurement of ``bench prefill``: medians over the rounds of the run."""

    subject: str
    """``transformers``, ``llama_cpp_f16`` or ``server``."""
    stages: int
    policy: str
    """How the prompt is cut: ``adaptive-ramp``, ``fixed:128`` and so on, ``lock-step`` for any with credits 0."""
    threads: int
    """CPU threads of each stage; 0 shares the cores by load."""
    credits: int | None
    """Chunks of one prompt before the second stage; None where there are no stages."""
    prefill_rows_while_decoding: int | None
    """Most prefill rows of a frame beside running streams; 0 is no bound, None where nothing schedules."""
    scenario: str
    """``cold``, ``repeat``, ``repeat-sampled``, ``system-prompt``, ``chat`` or ``interference``."""
    cache: str
    """What the prompt finds: ``cold`` nothing, ``full`` all but its last token at least, ``prefix`` a part."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the server did not compute."""
    shared_tokens: int
    """Prompt tokens that an earlier request under the same key had too."""
    ttft_ms: float
    """Milliseconds from the request to the first token, as the client sees it."""
    ttft_min_ms: float
    ttft_max_ms: float
    prompt_tokens_per_s: float
    """Tokens of the whole prompt, computed or not, per second until the first token."""
    rounds: int
    streams: int = 0
    """Streams that run beside the prompt."""
    gaps: Gaps | None = None
    """Of the running streams while the prompt comes in."""
    quiet_gaps: Gaps | None = None
    """Of the same streams just before."""


class Kind(NamedTuple):
    """What is measured of a prompt: the fields ``scenario`` and ``cache`` of its row."""

    scenario: str
    cache: str


COLD = Kind("cold", "cold")


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt of one round; gaps in seconds."""

    prompt_tokens: int
    ttft_s: float
    cached_tokens: int = 0
    shared_tokens: int = 0
    streams: int = 0
    gaps: tuple[float, ...] = ()
    quiet_gaps: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rows of one subject, set up in one way, have in common."""

    subject: str
    stages: int
    policy: str
    threads: int
    credits: int | None = None
    prefill_rows_while_decoding: int | None = None

    @classmethod
    def of(cls, deployment: Deployment) -> Setting:
        """That of a server."""
        return cls(
            "server",
            deployment.pipeline.stages,
            policy_label(deployment.prefill),
            deployment.pipeline.threads,
            deployment.prefill.credits,
            deployment.scheduler.prefill_rows_while_decoding,
        )


def policy_label(prefill: PrefillSection) -> str:
    """How prompts are cut, in short."""
    if prefill.credits == 0:
        return "lock-step"
    match prefill.policy:
        case "fixed":
            return f"fixed:{prefill.chunk_tokens}"
        case "schedule":
            return f"schedule:{prefill.schedule}"
        case other:
            return other


def check_cache(kind: Kind, sample: Sample) -> Sample:
    """The sample, if its prompt found what its kind says; otherwise the figure would be that of something else.

    The first token needs the rows of the last prompt token or its known output, so all but one token is full.
    """
    cached, most = sample.cached_tokens, sample.prompt_tokens - 1
    fits = {"cold": cached == 0, "full": cached >= most, "prefix": 0 < cached < most}
    if not fits[kind.cache]:
        raise SkippyError(
            f"{kind.scenario}: the server had {cached} of {sample.prompt_tokens} prompt tokens in its cache, "
            f"which is not {kind.cache!r}"
        )
    return sample


def rows_of(setting: Setting, rounds: Sequence[Mapping[Kind, Sample]]) -> list[PrefillRow]:
    """The rows of the same few prompts, each measured once in every round."""
    return [make_row(setting, kind, [each[kind] for each in rounds]) for kind in rounds[0]]


def make_row(setting: Setting, kind: Kind, samples: Sequence[Sample]) -> PrefillRow:
    """Medians of one prompt; its length may differ by a few tokens where answers are part of it."""
    times = [1000 * sample.ttft_s for sample in samples]
    ttft_ms = round(statistics.median(times), 2)
    prompt_tokens = _middle([sample.prompt_tokens for sample in samples])
    return PrefillRow(
        subject=setting.subject,
        stages=setting.stages,
        policy=setting.policy,
        threads=setting.threads,
        credits=setting.credits,
        prefill_rows_while_decoding=setting.prefill_rows_while_decoding,
        scenario=kind.scenario,
        cache=kind.cache,
        prompt_tokens=prompt_tokens,
        cached_tokens=_middle([sample.cached_tokens for sample in samples]),
        shared_tokens=_middle([sample.shared_tokens for sample in samples]),
        ttft_ms=ttft_ms,
        ttft_min_ms=round(min(times), 2),
        ttft_max_ms=round(max(times), 2),
        prompt_tokens_per_s=round(1000 * prompt_tokens / ttft_ms, 2),
        rounds=len(samples),
        streams=samples[0].streams,
        gaps=summarize_gaps([gap for sample in samples for gap in sample.gaps]),
        quiet_gaps=summarize_gaps([gap for sample in samples for gap in sample.quiet_gaps]),
    )


def _middle(counts: Sequence[int]) -> int:
    """The median, and the one of two that was measured."""
    return statistics.median_high(counts)


def gaps_within(arrivals: Sequence[float], start: float, end: float) -> list[float]:
    """Times between two arrivals that lie in ``[start, end]`` at least in part, all in seconds."""
    return [after - before for before, after in pairwise(arrivals) if after > start and before < end]


def summarize_gaps(gaps: Sequence[float]) -> Gaps | None:
    """Median, 95th percentile and maximum of gaps in seconds; None where there are none."""
    if not gaps:
        return None
    middle, high, most = (round(1000 * float(np.percentile(gaps, rank)), 2) for rank in (50, 95, 100))
    return Gaps(middle, high, most)
