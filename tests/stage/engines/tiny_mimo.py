"""A tiny MiMo: a Qwen2 with a multi-token prediction head, and the head in transformers' own layer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm, Qwen2RotaryEmbedding

from tests.stage.engines.tiny import Tiny, make_model, write_model

PREFIX = "model.mtp_layers.0."


class ReferenceHead(torch.nn.Module):
    """The head as published: norms, a product that joins, a decoder layer, a norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.token_layernorm = Qwen2RMSNorm(size, eps)
        self.hidden_layernorm = Qwen2RMSNorm(size, eps)
        self.final_layernorm = Qwen2RMSNorm(size, eps)
        self.input_proj = torch.nn.Linear(2 * size, size, bias=False)
        self.layer = Qwen2DecoderLayer(config, 0)
        self.rotary = [Qwen2RotaryEmbedding(config)]  # in a list: it has no weights of its own

    def tensors(self) -> dict[str, torch.Tensor]:
        """By published names: the layer's lie beside the norms."""
        return {PREFIX + name.removeprefix("layer."): value for name, value in self.state_dict().items()}

    def forward(self, joined: torch.Tensor) -> torch.Tensor:
        """``[rows, hidden]`` behind the final norm for joined rows of a whole sequence."""
        rows = len(joined)
        mask = torch.full((rows, rows), float("-inf")).triu(1)[None, None]
        rotary = self.rotary[0](joined[None], torch.arange(rows)[None])
        out = self.layer(joined[None], attention_mask=mask, position_embeddings=rotary)
        return self.final_layernorm(out[0] if isinstance(out, tuple) else out)[-rows:].reshape(rows, -1)


@dataclass
class TinyMimo:
    """The model in transformers, its head, and its folder."""

    model: Any
    head: ReferenceHead
    folder: Path

    def drafts(self, text: Sequence[int], count: int, allowed: Sequence[int] | None = None) -> list[int]:
        """What the head drafts behind a text whose last token is the model's latest prediction."""
        drafted: list[int] = []
        with torch.no_grad():
            hidden = self.model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
            rows = [self._join(hidden, text[1:])]
            while True:
                out = self.head(torch.cat(rows))[-1:]
                logits = self.model.lm_head(out)[0]
                if allowed is not None:
                    outside = torch.ones(len(logits), dtype=torch.bool)
                    outside[list(allowed)] = False
                    logits = logits.masked_fill(outside, float("-inf"))
                drafted.append(int(logits.argmax()))
                if len(drafted) == count:
                    return drafted
                rows.append(self._join(out, drafted[-1:]))

    def _join(self, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(torch.tensor(tokens))
        head = self.head
        joined: torch.Tensor = head.input_proj(
            torch.cat([head.hidden_layernorm(hidden), head.token_layernorm(embedded)], -1)
        )
        return joined


def make_mimo(folder: Path, dtype: torch.dtype = torch.float32) -> TinyMimo:
    """Write a tiny MiMo with random weights."""
    tiny = Tiny("qwen2", dtype=dtype)
    model = make_model(tiny)
    head = ReferenceHead(model.config).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(0.3 * noise + (0.0 if name.endswith("bias") else 1.0))
            else:
                weight.copy_(noise * weight.shape[1] ** -0.5)
            weight.copy_(weight.to(dtype).float())
    write_model(model, tiny, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name: value.to(dtype).contiguous() for name, value in head.tensors().items()}
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return TinyMimo(model, head, folder)
