"""What one stage is told: typed, checked, and carried as flat parameters of its config.pbtxt.

Every field has a default, a range and one line of doc in its ``Meta``; the deployment file of the
orchestrator is made of the same kind of struct, and the reference page is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from skippy_stage.errors import SkippyError

WeightFormat = Literal["f16", "f32", "int8"]
LinkDtype = Literal["auto", "f32", "f16", "bf16"]
PrefixPayload = Literal["auto", "resident-kv", "kv-recurrent", "full-state"]
StagePrefixPayload = Literal["off", "auto", "resident-kv", "kv-recurrent", "full-state"]

T = TypeVar("T", bound=msgspec.Struct)


class SettingsError(SkippyError):
    """A setting that is unknown, of the wrong type or out of range; names the setting."""


class StageSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of one stage."""

    name: Annotated[str, Meta(min_length=1, description="Triton model name of the stage.")]
    index: Annotated[int, Meta(ge=0, description="Place of the stage in the pipeline, from 0.")] = 0
    model: Annotated[
        str,
        Meta(
            min_length=1,
            description="Where the weights are: a safetensors folder, a .gguf file, or `package:NAME/FILE` for "
            "a file inside an installed Python package. Relative paths start at $SKIPPY_MODELS.",
        ),
    ]
    mtp_head: Annotated[
        str,
        Meta(
            description="A .safetensors file with an MTP head for the model, found as the model is; used by the "
            "last stage. Empty: that of the checkpoint, if it has one."
        ),
    ] = ""
    first_layer: Annotated[int, Meta(ge=0, description="First layer of the stage.")]
    last_layer: Annotated[int, Meta(ge=1, description="Layer after the last one of the stage.")]
    engine: Annotated[
        str,
        Meta(
            min_length=1,
            description="What computes: `torch`, or `package.module:factory` for an engine of your own.",
        ),
    ] = "torch"
    device: Annotated[
        str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$", description="Where: `cpu`, `cuda` or `cuda:N`.")
    ] = "cpu"
    weights: Annotated[
        WeightFormat,
        Meta(
            description="CPU linears: packed `f16` (f32 accumulation), `f32`, or dynamic `int8`. "
            "On CUDA f16 or f32."
        ),
    ] = "f16"
    link_dtype: Annotated[
        LinkDtype,
        Meta(
            description="Type of the hidden rows that leave the stage; `auto` is what the engine computes in."
        ),
    ] = "auto"
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="CPU threads for one frame; 0 takes all cores of the machine.")
    ] = 0
    kv_tokens: Annotated[
        int, Meta(ge=16, description="KV budget in tokens, shared by all sessions of the stage.")
    ] = 32768
    kv_block_tokens: Annotated[int, Meta(ge=1, le=1024, description="Tokens per KV block.")] = 16
    prefix_payload: Annotated[
        StagePrefixPayload,
        Meta(
            description="What the prefix store keeps of a session: `off` is no store, `auto` fits the model."
        ),
    ] = "auto"
    prefix_max_entries: Annotated[
        int, Meta(ge=1, description="Exact states that the prefix store keeps.")
    ] = 64
    prefix_max_bytes: Annotated[
        int, Meta(ge=0, description="Bytes of all exact states in the prefix store; 0 is no limit.")
    ] = 0
    activation_bytes: Annotated[
        int, Meta(ge=0, description="Bytes of hidden rows kept of first prefill chunks; 0 keeps none.")
    ] = 64 << 20


def to_parameters(settings: msgspec.Struct) -> dict[str, str]:
    """Flatten a settings struct to the string parameters of a config.pbtxt.

    Strings go as they are, everything else as JSON; ``from_parameters`` is its inverse.
    """
    plain = msgspec.to_builtins(settings)
    return {
        key: value if isinstance(value, str) else msgspec.json.encode(value).decode()
        for key, value in plain.items()
    }


def from_parameters(kind: type[T], parameters: Mapping[str, str]) -> T:
    """Rebuild a settings struct from string parameters; unknown or missing keys are refused by name."""
    strings = {field.name for field in msgspec.structs.fields(kind) if _is_text(field.type)}
    plain: dict[str, object] = {}
    for key, text in parameters.items():
        if key in strings:
            plain[key] = text
            continue
        try:
            plain[key] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            plain[key] = text
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise SettingsError(f"settings of {kind.__name__}: {error}") from None


def _is_text(annotation: object) -> bool:
    base = getattr(annotation, "__origin__", annotation)
    args = getattr(base, "__args__", ())
    return base is str or (bool(args) and all(isinstance(arg, str) for arg in args))
