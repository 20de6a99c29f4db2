"""What goes in and what comes out: options, chunks, results, status. Plain data, no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict


class Message(TypedDict):
    """One turn of a chat, as chat templates take it."""

    role: str
    content: str


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of ``generate`` and ``stream``; what is left out is the server's default.

    Exactly one of the prompt, ``input_ids`` and ``messages`` is given.

    Attributes:
        input_ids: token ids instead of text.
        messages: a chat, turned into a prompt by the server's chat template.
        max_tokens: most tokens to generate.
        temperature: 0 is greedy; giving one above 0 turns sampling on.
        top_k: sample from the k most likely tokens; 0 is off.
        top_p: sample from the smallest set of tokens with this probability together.
        min_p: leave out tokens below this fraction of the most likely token's probability.
        seed: makes sampling repeatable; the one used is reported back.
        ignore_eos: go on past the end token, to ``max_tokens``.
        stop_words: texts that end the generation; they aren't part of the output.
        prompt_cache_key: only requests with the same key share cached prefixes, and those without one
            share among themselves.
        speculation: how the server guesses ahead: ``off``, a plan's name, limits such as
            ``window=4,depth=1``, or a name and limits. The text doesn't depend on it.
        request_id: a name for the request, shown in the server's logs.
        timeout: seconds until GenerationTimeout; overrides the client's.
    """

    input_ids: Sequence[int]
    messages: Sequence[Message]
    max_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    ignore_eos: bool | None
    stop_words: str | Sequence[str] | None
    prompt_cache_key: str | None
    speculation: str | None
    request_id: str | None
    timeout: float | None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response of a stream. Text, tokens and ``num_output_tokens`` are what is new in it.

    ``finish_reason`` is empty until the last chunk, then ``"stop"`` or ``"length"``. What the
    caches and speculation did comes with the last chunk too, 0 and None before; see Generation.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    seed: int | None
    cached_tokens: int = 0
    cache_stats: Mapping[str, Any] | None = field(default=None, hash=False)
    total_draft_tokens: int = 0
    total_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds from sending the request to the first token and to the end, on the client's clock."""

    ttft_s: float
    total_s: float


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer.

    ``cached_tokens`` of the prompt's tokens weren't computed again. ``cache_stats`` is the server's record
    of what its prefix cache did for this request: ``status`` and ``hit_kind``, counts of tokens, times in
    milliseconds. 0 and None come from a server without a prefix cache.

    Of ``total_draft_tokens`` that were guessed ahead and verified, ``total_accepted_draft_tokens`` were right.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    seed: int | None
    timings: Timings
    cached_tokens: int = 0
    cache_stats: Mapping[str, Any] | None = field(default=None, hash=False)
    total_draft_tokens: int = 0
    total_accepted_draft_tokens: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafts that was right, or None where there were none."""
        drafts = self.total_draft_tokens
        return self.total_accepted_draft_tokens / drafts if drafts else None

    @property
    def tokens_per_s(self) -> float | None:
        """Rate after the first token, or None where there is nothing to divide."""
        decode_s = self.timings.total_s - self.timings.ttft_s
        measured = self.num_output_tokens > 1 and decode_s > 0
        return (self.num_output_tokens - 1) / decode_s if measured else None


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """What a stage keeps of prompts it has seen; None is what it didn't report.

    Attributes:
        payload: what is kept: ``resident-kv``, ``kv-recurrent``, ``full-state``, or ``off`` for nothing.
        entries: pieces that are held: nodes of a tree of KV blocks, or states.
        blocks: KV blocks that only the cache holds; sessions that need them get them.
        tokens: tokens of all that is held.
        bytes: memory of states, in bytes; KV blocks are not in it.
        leases: running sessions that keep something from being removed.
        lookups: sessions that asked, since the stage started like all that follow.
        hits: lookups that found something; how much of it is restored is decided for all stages together.
        restored_tokens: tokens that were not computed again.
        recorded_tokens: tokens that were added.
        evicted: entries that were removed to make room.
        dropped: records that were left out or cut short, for lack of room.
        activation_bytes: memory of kept hidden rows, in bytes.
        activation_hits: first prefill chunks whose hidden rows were there already.
        activation_misses: first prefill chunks whose hidden rows were not.
    """

    payload: str | None = None
    entries: int | None = None
    blocks: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    leases: int | None = None
    lookups: int | None = None
    hits: int | None = None
    restored_tokens: int | None = None
    recorded_tokens: int | None = None
    evicted: int | None = None
    dropped: int | None = None
    activation_bytes: int | None = None
    activation_hits: int | None = None
    activation_misses: int | None = None


@dataclass(frozen=True, slots=True)
class HeadStatus:
    """What the MTP head of the last stage did since the stage started; None is what it didn't report.

    Attributes:
        layers: layers that it has; 0 for a stage without a head.
        drafts: tokens that it drafted.
        failures: frames whose drafts were lost to a fault of the head; their requests went on without.
        busy_us: microseconds that it computed.
    """

    layers: int | None = None
    drafts: int | None = None
    failures: int | None = None
    busy_us: int | None = None


@dataclass(frozen=True, slots=True)
class SpeculationStatus:
    """What came of guessing ahead since the server started; None is what it didn't report.

    Attributes:
        draft_tokens: tokens that were guessed and verified.
        accepted_draft_tokens: those of them that were right.
        mean_acceptance_length: tokens per verify window, the target's own token included.
        by_source: guessed tokens and right ones, by what guessed them: ``suffix``, ``native-mtp``, ...
    """

    draft_tokens: int | None = None
    accepted_draft_tokens: int | None = None
    mean_acceptance_length: float | None = None
    by_source: Mapping[str, tuple[int, int]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One stage as the server sees it; None is what it didn't report.

    Layers are [first_layer, last_layer). ``raw`` is the whole report, with what this version of the
    client has no field for.
    """

    name: str
    ready: bool
    reason: str
    engine: str | None = None
    first_layer: int | None = None
    last_layer: int | None = None
    kv_blocks: int | None = None
    kv_blocks_used: int | None = None
    kv_block_tokens: int | None = None
    sessions: int | None = None
    frames: int | None = None
    rows: int | None = None
    busy_us: int | None = None
    rss_bytes: int | None = None
    last_error: str | None = None
    prefix: PrefixStatus | None = None
    head: HeadStatus | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The server's own view of itself: ``reason`` says why it isn't ready.

    ``counters`` are totals since the server started, by the server's names; times in it are milliseconds.
    ``draft`` is the stage of the draft model, where the deployment has one.
    """

    ready: bool
    reason: str
    model: str | None
    active: int | None
    waiting: int | None
    stages: tuple[StageStatus, ...]
    counters: Mapping[str, float] = field(default_factory=dict, hash=False)
    speculation: SpeculationStatus | None = None
    draft: StageStatus | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
