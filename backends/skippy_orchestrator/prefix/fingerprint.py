"""What makes cached output the same output: sampling, namespace, and whether it may be used at all (spec 4.2, 5.4).

Invariants:

* Two fingerprints are equal only if every field of the sampling and the metadata are; of a greedy request the
  fields that only steer the drawing don't count.
* A new field of ``SamplingParams`` changes fingerprints without a change here; one of a type that is unknown
  here is an error, never left out.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Final

import msgspec
from skippy_stage.protocol import SamplingParams

from skippy_orchestrator.requests import GenerationRequest

_DOMAIN: Final = b"skippy-sampling-fingerprint-v2"


def sampling_fingerprint(sampling: SamplingParams, metadata: str | None = None) -> bytes:
    """A digest of every sampling field and of the chat sampling metadata (spec 5.3, 5.4).

    Greedy output does not depend on seed and sample index, which are set for every request: they would keep
    equal requests apart.
    """
    if sampling.greedy:
        sampling = msgspec.structs.replace(sampling, seed=0, sample_index=0)
    digest = hashlib.sha256(_part(_DOMAIN))
    for name in sampling.__struct_fields__:
        digest.update(_part(name.encode()) + _part(_value(getattr(sampling, name))))
    digest.update(_part(b"metadata") + _part(b"\0" if metadata is None else b"\1" + metadata.encode()))
    return digest.digest()


def _part(data: bytes) -> bytes:
    """Data behind its length, so that no two lists of parts run together to the same bytes."""
    return struct.pack("<Q", len(data)) + data


def _value(value: object) -> bytes:
    """A field's value, its type included; floats by bit pattern, lists by count and entries."""
    match value:
        case bool():
            return b"b" + bytes([value])
        case int():
            return b"i" + str(value).encode()
        case float():
            return b"f" + struct.pack("<d", value)
        case str():
            return b"s" + value.encode()
        case tuple():
            return b"t" + struct.pack("<Q", len(value)) + b"".join(_part(_value(entry)) for entry in value)
        case _:
            raise TypeError(f"no fingerprint of a {type(value).__name__}")


def replay_safe(request: GenerationRequest) -> bool:
    """Whether output tokens of this request may be kept, and kept ones served for it (spec 5.4).

    That is for greedy requests, and for those with a seed of their client's own. The spec excludes the latter,
    because its sampler has a state that moves with every draw. Here a draw depends on seed, position and token
    alone, so the same seed gives the same tokens wherever they come from. A seed that was drawn here never comes
    again: keeping its tokens would only push others out.
    """
    return request.sampling.greedy or request.seeded


def namespace_of(tokenizer: str, cache_key: str, *, native_mtp: bool = False) -> str:
    """What separates prefixes that must not be shared: the tokenizer, and the client's key (spec 4.2).

    ``tokenizer`` is an identity of whatever turns text into tokens; its length goes first, so that no identity
    with a key looks like another one without. ``native_mtp``: an MTP head has seen the prefix too, and whoever drafts
    with it needs that.
    """
    key = f"openai:prompt_cache_key:{cache_key}" if cache_key else ""
    return f"{len(tokenizer)}:{tokenizer}{'mtp:' if native_mtp else ''}{key}"
