"""A model with some layers left out, as a file of its own: a draft model with the same tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf


def write_cut(source: Path, target: Path, layers: Sequence[int]) -> None:
    """Write a GGUF with just these layers of another one, renumbered; tensors and tokenizer as they are."""
    reader = gguf.GGUFReader(source)
    architecture = str(reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = len(layers) if name == f"{architecture}.block_count" else field.contents()
        sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], sub_type=sub_type)
    numbers = {layer: place for place, layer in enumerate(layers)}
    for tensor in reader.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, number, rest = name.split(".", 2)
            if int(number) not in numbers:
                continue
            name = f"blk.{numbers[int(number)]}.{rest}"
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
