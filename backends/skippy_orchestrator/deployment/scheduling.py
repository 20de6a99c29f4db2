"""Sections about what runs when: the scheduler, prefill and the prefix cache."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from skippy_stage.settings import PrefixPayload

from skippy_orchestrator.deployment.section import Section
from skippy_orchestrator.prefill import PrefillPolicy

PrefixMode = Literal["disabled", "record", "lookup-record"]


class SchedulerSection(Section, frozen=True):
    """How steps of all sessions become frames."""

    max_frame_rows: Annotated[
        int,
        Meta(ge=1, le=2048, description="Token budget of a frame: decode rows and prefill rows together."),
    ] = 256
    max_sessions: Annotated[
        int, Meta(ge=1, le=4096, description="Sessions that may run at the same time; further ones wait.")
    ] = 64
    frames_per_link: Annotated[
        int,
        Meta(ge=1, le=64, description="Frames outstanding at one stage; more for remote or delayed links."),
    ] = 2
    min_group_rows: Annotated[
        int,
        Meta(
            ge=1,
            description="Decoding sessions are spread over as many frames as there are stages, "
            "but not in groups smaller than this.",
        ),
    ] = 4
    prefill_rows_while_decoding: Annotated[
        int,
        Meta(
            ge=0,
            description="Most prefill rows of a frame while any session decodes, so that the time between two "
            "tokens of a running stream stays bounded; 0 is no bound.",
        ),
    ] = 64


class PrefillSection(Section, frozen=True):
    """How prompts are cut into chunks."""

    policy: Annotated[
        str,
        Meta(
            description="`fixed`: all chunks have chunk_tokens; `schedule`: as listed in schedule; `adaptive` or "
            "`adaptive-ramp`: larger while the way to the next stage is hidden behind compute, else smaller."
        ),
    ] = "adaptive-ramp"
    chunk_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2048,
            description="Tokens of a chunk with a fixed size; an adaptive policy takes a prompt up to this size "
            "in one chunk.",
        ),
    ] = 256
    schedule: Annotated[
        str,
        Meta(
            description="Tokens of the first chunk, the second and so on, separated by commas; the last size is "
            "that of all further chunks. Empty is no schedule."
        ),
    ] = ""
    adaptive_start: Annotated[
        int, Meta(ge=1, le=2048, description="Tokens of the first adaptive chunk, and of the smallest one.")
    ] = 128
    adaptive_step: Annotated[
        int, Meta(ge=1, le=2048, description="Tokens by which an adaptive chunk grows or shrinks.")
    ] = 128
    adaptive_max: Annotated[
        int,
        Meta(ge=1, le=2048, description="Tokens of the largest adaptive chunk; at least adaptive_start."),
    ] = 384
    adaptive_target_ms: Annotated[
        float,
        Meta(gt=0, description="Milliseconds that an adaptive chunk may take on the slowest stage."),
    ] = 100.0
    credits: Annotated[
        int,
        Meta(
            ge=0,
            le=64,
            description="Chunks of one prompt between stage 0 and the start of the second stage; "
            "0 is lock-step: a chunk waits for the end of the one before.",
        ),
    ] = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        PrefillPolicy.of(self)


class PrefixCacheSection(Section, frozen=True):
    """What stages keep of finished work, so that a prompt they have seen is not computed again."""

    mode: Annotated[
        PrefixMode,
        Meta(description="`record` keeps prefixes and never uses them, `lookup-record` does both."),
    ] = "lookup-record"
    payload: Annotated[
        PrefixPayload,
        Meta(
            description="What is kept: `resident-kv` shares KV blocks, any common prefix matches; `kv-recurrent` and "
            "`full-state` are states of models that can't be cut back, whole matches only; `auto` fits the model."
        ),
    ] = "auto"
    min_tokens: Annotated[
        int, Meta(ge=1, description="Tokens of the shortest prefix that is recorded or counts as a hit.")
    ] = 64
    stride_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="Tokens between the lengths at which states are kept; min_tokens where that is less.",
        ),
    ] = 128
    record_limit: Annotated[
        int,
        Meta(
            ge=0, description="Lengths at which the exact state of one prompt is recorded; 0 takes them all."
        ),
    ] = 2
    max_entries: Annotated[
        int,
        Meta(
            ge=1, description="Exact states per stage, and prompts whose output is kept (those at most 512)."
        ),
    ] = 64
    max_bytes: Annotated[
        int, Meta(ge=0, description="Bytes of all exact states of a stage; 0 is no limit.")
    ] = 0
    activation_bytes: Annotated[
        int,
        Meta(
            ge=0, description="Bytes of hidden rows that a stage keeps of first prefill chunks; 0 keeps none."
        ),
    ] = 64 << 20
    replay_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=8,
            description="Output tokens kept of a prompt, to be served again without computing; 0 keeps none.",
        ),
    ] = 8
    record_output: Annotated[
        bool,
        Meta(
            description="Whether the answer is recorded behind its prompt too, for the next turn of a chat."
        ),
    ] = True
    bypass_native_mtp: Annotated[
        bool,
        Meta(description="Whether requests that draft with the model's own MTP head restore nothing."),
    ] = False
    speculate_after_restore: Annotated[
        bool,
        Meta(description="Whether n-gram speculation goes on after the whole prompt was restored."),
    ] = True
