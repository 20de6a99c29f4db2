"""Just enough of Triton's config.pbtxt: a typed model configuration and its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """An input or output; ``dtype`` is Triton's name without the ``TYPE_``."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    optional: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """A decoupled Python-based model with one instance.

    The instance is of KIND_CPU for every device: the engine itself places its tensors, Triton only
    starts the process.
    """

    name: str
    backend: str
    max_batch_size: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    parameters: Mapping[str, str]


def render(config: ModelConfig) -> str:
    """The text of a model's config.pbtxt."""
    lines = [
        f"name: {quote(config.name)}",
        f"backend: {quote(config.backend)}",
        f"max_batch_size: {config.max_batch_size}",
        "model_transaction_policy { decoupled: true }",
        "instance_group [ { count: 1, kind: KIND_CPU } ]",
        *_block("input", [_tensor(tensor) for tensor in config.inputs]),
        *_block("output", [_tensor(tensor) for tensor in config.outputs]),
        *_block(
            "parameters",
            [
                f"{{ key: {quote(key)}, value: {{ string_value: {quote(value)} }} }}"
                for key, value in config.parameters.items()
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


def quote(text: str) -> str:
    """A string literal of protobuf's text format."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'


def _tensor(tensor: Tensor) -> str:
    dims = ", ".join(str(size) for size in tensor.dims)
    optional = ", optional: true" if tensor.optional else ""
    return f"{{ name: {quote(tensor.name)}, data_type: TYPE_{tensor.dtype}, dims: [ {dims} ]{optional} }}"


def _block(name: str, entries: list[str]) -> list[str]:
    if not entries:
        return []
    return [f"{name} [", *(f"  {entry}," for entry in entries[:-1]), f"  {entries[-1]}", "]"]
