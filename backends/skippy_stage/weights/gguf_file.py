"""GGUF files of the llama, qwen2 and qwen3 architectures, dequantised tensor by tensor."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.weights.checkpoint import HEAD, Checkpoint, model_tensors
from skippy_stage.weights.config import ModelConfig
from skippy_stage.weights.gguf_header import GgufHeader, Scalar, read_header

_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_ROTARY_FACTORS: Final = "rope_freqs.weight"
_WHOLE: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    HEAD: "output.weight",
}
_PER_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
# Metadata (after the architecture's name) that changes what is computed, with the values that don't.
_NEUTRAL: Final[dict[str, tuple[Scalar, ...]]] = {
    "expert_count": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.causal": (True,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (0.0, 1.0),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "use_parallel_residual": (False,),
    "rope.scaling.type": ("none", ""),
    "rope.scale_linear": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
}


class GgufCheckpoint(Checkpoint):
    """One ``.gguf`` file."""

    def __init__(self, path: Path) -> None:
        try:
            with path.open("rb") as handle:
                self._data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise SkippyError(f"{path}: {error}") from None
        self._header = read_header(path, self._data)
        super().__init__(path, self._config(path))
        self._names = {name: _gguf_name(name) for name in model_tensors(self.config)}
        theirs = {ours: name for name, ours in self._names.items()}
        found = {theirs.get(name, name): tensor.shape for name, tensor in self._header.tensors.items()}
        self._check_tensors(found, [_ROTARY_FACTORS])

    def _config(self, path: Path) -> ModelConfig:
        fields = _Fields(path, self._header)
        fields.refuse()
        tensors = self._header.tensors
        heads = fields.integer("attention.head_count")
        if heads < 1:
            raise UnsupportedModel(
                f"{path}: {fields.architecture}.attention.head_count {heads} is not computed"
            )
        hidden = fields.integer("embedding_length")
        head_dim = fields.integer("attention.key_length", hidden // heads)
        rotary = fields.integer("rope.dimension_count", head_dim)
        if fields.integer("attention.value_length", head_dim) != head_dim:
            raise UnsupportedModel(f"{path}: attention.value_length other than key_length is not computed")
        if rotary != head_dim:
            raise UnsupportedModel(
                f"{path}: partial rotary embedding (rope.dimension_count {rotary}) is not computed"
            )
        embedding = tensors.get("token_embd.weight")
        kinds = [tensor.kind for tensor in tensors.values() if len(tensor.shape) > 1]
        factors = None
        if _ROTARY_FACTORS in tensors:
            factors = tuple(float(value) for value in self._dequantised(path, _ROTARY_FACTORS).ravel())
        return ModelConfig(
            architecture=fields.architecture,
            n_layers=fields.integer("block_count"),
            hidden_size=hidden,
            intermediate_size=fields.integer("feed_forward_length"),
            n_heads=heads,
            n_kv_heads=fields.integer("attention.head_count_kv", heads),
            head_dim=head_dim,
            vocab_size=embedding.shape[0] if embedding else 0,
            context_length=fields.integer("context_length"),
            rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
            rope_theta=fields.number("rope.freq_base", 10000.0),
            rope_scaling=None,
            rope_factors=factors,
            qkv_bias="blk.0.attn_q.bias" in tensors,
            o_bias="blk.0.attn_output.bias" in tensors,
            qk_norm=fields.architecture == "qwen3",
            tied_embeddings="output.weight" not in tensors,
            bos_token_id=fields.token("bos_token_id"),
            # Chat models end a turn with a token of its own besides the end of text.
            eos_token_ids=tuple(
                dict.fromkeys(
                    token
                    for key in ("eos_token_id", "eot_token_id", "eom_token_id")
                    if (token := fields.token(key)) is not None
                )
            ),
            dtype=_kind_name(max(sorted(set(kinds)), key=kinds.count)) if kinds else "f32",
        )

    def _read(self, name: str) -> npt.NDArray[np.float32]:
        values = self._dequantised(self.path, self._names[name])
        heads = {"q_proj": self.config.n_heads, "k_proj": self.config.n_kv_heads}
        part = name.split(".")[-2]
        if self.config.architecture == "llama" and part in heads:
            return _deinterleave(values, heads[part])
        return values

    def _dequantised(self, path: Path, name: str) -> npt.NDArray[np.float32]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._header.tensors[name]
        count = int(np.prod(tensor.shape, dtype=np.int64))
        try:
            kind = GGMLQuantizationType(tensor.kind)
            block, nbytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise UnsupportedModel(f"{path}: tensor {name!r} has the unknown type {tensor.kind}") from None
        if tensor.shape[-1] % block or tensor.offset + count // block * nbytes > len(self._data):
            raise SkippyError(f"{path}: tensor {name!r} lies outside the file")
        stored = np.frombuffer(self._data, np.uint8, count // block * nbytes, tensor.offset)
        try:
            values = dequantize(stored.reshape(*tensor.shape[:-1], -1), kind)
        except NotImplementedError:
            raise UnsupportedModel(
                f"{path}: tensor {name!r} has type {kind.name}, which cannot be read"
            ) from None
        result: npt.NDArray[np.float32] = values.astype(np.float32, copy=False).reshape(tensor.shape)
        return result


class _Fields:
    """Metadata of the file's own architecture, typed."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self._path = path
        self._metadata: Mapping[str, Scalar | tuple[Scalar, ...]] = header.metadata
        self.architecture = str(header.metadata.get("general.architecture"))

    def refuse(self) -> None:
        """Raise UnsupportedModel for metadata that changes the computation in a way not computed."""
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"{self._path}: general.architecture {self.architecture!r} is not computed "
                f"(known: {', '.join(_ARCHITECTURES)})"
            )
        for key, neutral in _NEUTRAL.items():
            value = self._metadata.get(f"{self.architecture}.{key}", neutral[0])
            if value not in neutral:
                raise UnsupportedModel(f"{self._path}: {self.architecture}.{key} {value!r} is not computed")
        window = self.integer("attention.sliding_window", 0)
        if 0 < window < self.integer("context_length"):
            raise UnsupportedModel(
                f"{self._path}: {self.architecture}.attention.sliding_window {window} is not computed"
            )

    def number(self, key: str, default: float | None = None) -> float:
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            raise SkippyError(f"{self._path}: {self.architecture}.{key} is missing")
        if isinstance(value, tuple):
            raise UnsupportedModel(
                f"{self._path}: {self.architecture}.{key} that differs between layers is not computed"
            )
        if not isinstance(value, int | float):
            raise SkippyError(f"{self._path}: {self.architecture}.{key} is {value!r}, expected a number")
        return float(value)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not value.is_integer():
            raise SkippyError(f"{self._path}: {self.architecture}.{key} is {value}, expected a whole number")
        return int(value)

    def token(self, key: str) -> int | None:
        value = self._metadata.get(f"tokenizer.ggml.{key}")
        return value if isinstance(value, int) else None


def _gguf_name(name: str) -> str:
    if name in _WHOLE:
        return _WHOLE[name]
    _, _, index, *parts, kind = name.split(".")
    return f"blk.{index}.{_PER_LAYER['.'.join(parts)]}.{kind}"


def _kind_name(kind: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"type {kind}"


def _deinterleave(values: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo the row order of llama GGUFs, which rotate neighbouring pairs, for rotation of the two halves."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
