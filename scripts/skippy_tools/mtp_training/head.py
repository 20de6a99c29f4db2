"""The head as torch trains it: the architecture that the stages compute (MiMo, DeepSeek-V3 section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from skippy_stage.weights import Checkpoint, rotary_frequencies
from skippy_stage.weights.checkpoint import EMBEDDING, FINAL_NORM, HEAD, MTP_PREFIX
from skippy_stage.weights.mtp_head import DRAFT_TOKENS, MtpHeadFile
from torch.nn import functional

_MATRICES: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class TrainedHead(torch.nn.Module):
    """One layer with what joins its input; starts as the model's last layer. ``draft_tokens`` are all it drafts."""

    def __init__(self, checkpoint: Checkpoint, draft_tokens: npt.NDArray[np.int64]) -> None:
        super().__init__()
        config = checkpoint.config
        if config.qkv_bias or config.o_bias or config.qk_norm:
            raise ValueError(
                f"heads for {config.architecture} are not trained: biases or norms of queries and keys"
            )
        self._config = config
        prefix = f"model.layers.{config.n_layers - 1}."

        def tensor(name: str) -> torch.Tensor:
            return torch.from_numpy(np.array(checkpoint.tensor(name), np.float32))

        def matrix(name: str) -> torch.nn.Parameter:
            part = "self_attn" if name in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
            return torch.nn.Parameter(tensor(f"{prefix}{part}.{name}.weight"))

        self.matrices = torch.nn.ParameterDict({name: matrix(name) for name in _MATRICES})
        size = config.hidden_size
        final = tensor(FINAL_NORM)
        self.norms = torch.nn.ParameterDict(
            {
                "token_layernorm": torch.nn.Parameter(torch.ones(size)),
                "hidden_layernorm": torch.nn.Parameter(torch.ones(size)),
                "input_layernorm": torch.nn.Parameter(tensor(f"{prefix}input_layernorm.weight")),
                "post_attention_layernorm": torch.nn.Parameter(
                    tensor(f"{prefix}post_attention_layernorm.weight")
                ),
                "final_layernorm": torch.nn.Parameter(final.clone()),
            }
        )
        half = torch.eye(size) * 0.7
        self.join = torch.nn.Parameter(torch.cat([half, half], 1) + 0.01 * torch.randn(size, 2 * size))
        self.draft_tokens = torch.from_numpy(draft_tokens)
        self._embedding = tensor(EMBEDDING)
        self._output = tensor(HEAD)[self.draft_tokens]
        self._frequencies = torch.from_numpy(rotary_frequencies(config))

    def joined(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The layer's input ``[chats, rows, hidden]`` for hidden rows and the tokens that follow them."""
        embedded = functional.embedding(tokens, self._embedding)
        both = [self._norm(hidden, "hidden_layernorm"), self._norm(embedded, "token_layernorm")]
        return functional.linear(torch.cat(both, -1), self.join)

    def layer(
        self, x: torch.Tensor, first: int, earlier: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The rows behind the final norm, and their keys and values.

        Row i of draft d, counted from 0, is at position i + d and stands for what was drafted from row i of the text:
        it attends to the text's rows up to i, to row i of each draft in ``earlier``, and to itself. ``earlier``
        begins with the text's own rows, which are those of draft 0.
        """
        config = self._config
        chats, rows, _ = x.shape
        normed = self._norm(x, "input_layernorm")
        query = self._rotated(self._heads(normed, "q_proj"), first)
        own = self._rotated(self._heads(normed, "k_proj"), first), self._heads(normed, "v_proj")
        repeat, scale = config.n_heads // config.n_kv_heads, config.head_dim**-0.5
        steps = [(k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)) for k, v in (*earlier, own)]
        keys, values = steps[0]
        seen = torch.ones(rows, keys.shape[2], dtype=torch.bool).tril(0)
        scores = [(query @ keys.transpose(-1, -2) * scale).masked_fill(~seen, float("-inf"))]
        scores += [(query * k[:, :, :rows]).sum(-1, keepdim=True) * scale for k, _ in steps[1:]]
        weights = torch.cat(scores, -1).softmax(-1)
        attended = weights[..., : keys.shape[2]] @ values
        for depth, (_, v) in enumerate(steps[1:]):
            attended = attended + weights[..., keys.shape[2] + depth, None] * v[:, :, :rows]
        x = x + functional.linear(attended.transpose(1, 2).reshape(chats, rows, -1), self.matrices["o_proj"])
        normed = self._norm(x, "post_attention_layernorm")
        gate = functional.silu(functional.linear(normed, self.matrices["gate_proj"]))
        inner = gate * functional.linear(normed, self.matrices["up_proj"])
        x = x + functional.linear(inner, self.matrices["down_proj"])
        return self._norm(x, "final_layernorm"), own

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """``[..., draft tokens]``."""
        return functional.linear(rows, self._output)

    @classmethod
    def load(cls, path: Path, checkpoint: Checkpoint) -> TrainedHead:
        """What ``save`` wrote, to learn more; raises for a head of another model, by the tensor's name."""
        file = MtpHeadFile(path, checkpoint)
        if file.draft_tokens is None:
            raise ValueError(f"{path}: no draft vocabulary: it was not trained here")
        head = cls(checkpoint, file.draft_tokens)
        with torch.no_grad():
            for name, value in head._tensors().items():
                value.copy_(torch.from_numpy(np.array(file.tensor(name))))
        return head

    def save(self, path: Path) -> None:
        """Write the head in 16 bits, under its published names."""
        half = {name: value.detach().half().contiguous() for name, value in self._tensors().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(half | {DRAFT_TOKENS: self.draft_tokens.int()}, path)

    def _tensors(self) -> dict[str, torch.nn.Parameter]:
        names = {name: f"self_attn.{name}" if name[0] in "qkvo" else f"mlp.{name}" for name in _MATRICES}
        tensors = {f"{MTP_PREFIX}0.{names[name]}.weight": value for name, value in self.matrices.items()}
        tensors |= {f"{MTP_PREFIX}0.{name}.weight": value for name, value in self.norms.items()}
        return tensors | {f"{MTP_PREFIX}0.input_proj.weight": self.join}

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.norms[name], self._config.rms_norm_eps)

    def _heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """``[chats, heads, rows, head_dim]``."""
        chats, rows, _ = x.shape
        product = functional.linear(x, self.matrices[name])
        return product.view(chats, rows, -1, self._config.head_dim).transpose(1, 2)

    def _rotated(self, heads: torch.Tensor, first: int) -> torch.Tensor:
        positions = torch.arange(first, first + heads.shape[2], dtype=torch.float32)
        angles = torch.outer(positions, self._frequencies)
        cos, sin = angles.cos(), angles.sin()
        low, high = heads.chunk(2, -1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)
