"""Requests, sessions and prefix terms for tests that drive a part of the core by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skippy_orchestrator.prefill import PrefillPolicy, PrefillTerms, TransportPool
from skippy_orchestrator.prefix.outcome import CacheStatus, Lookup
from skippy_orchestrator.prefix.session import PrefixTerms
from skippy_orchestrator.requests import GenerationRequest
from skippy_stage.protocol import SamplingParams

OPEN_LOOKUP = Lookup(CacheStatus.MISS, restore=True, fused=True, first_token=True, replay=True)


def a_request(prompt: Sequence[int], max_tokens: int, **options: Any) -> GenerationRequest:
    """A request; greedy unless said otherwise."""
    sampling = options.pop("sampling", SamplingParams())
    return GenerationRequest(prompt=tuple(prompt), max_tokens=max_tokens, sampling=sampling, **options)


def fixed(chunk_tokens: int, credits: int = 2, pool: TransportPool | None = None) -> PrefillTerms:
    """Chunks of one size."""
    policy = PrefillPolicy(policy="fixed", chunk_tokens=chunk_tokens)
    return PrefillTerms(policy, credits, pool if pool is not None else TransportPool())


def probing(*outputs: int, **options: Any) -> PrefixTerms:
    """The stages are asked; these output tokens are known. Everything is recorded unless said otherwise."""
    plain: dict[str, Any] = {
        "lookup": OPEN_LOOKUP,
        "namespace": "room",
        "probes": True,
        "outputs": outputs,
        "records": True,
        "record_output": True,
        "hidden_size": 4,
        "stages": 2,
    }
    return PrefixTerms(**{**plain, **options})
