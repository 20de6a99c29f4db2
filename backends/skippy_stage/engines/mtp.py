"""A multi-token prediction head: one layer that drafts what follows the model's own prediction.

DeepSeek-V3 (section 2.2) and MiMo: the row at position i joins the model's hidden row there, behind the final norm,
with the embedding of token i + 1, goes through a layer of the model's shape with a KV cache of its own, and
predicts token i + 2 with the model's output head. Drafts further ahead come from the head's own output in the
hidden row's place, one position on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.engines.base import DraftRows, SequenceRows
from skippy_stage.engines.linear import Linear, check_f16_range, make_linear
from skippy_stage.engines.sequences import BatchRows, SequenceStore
from skippy_stage.engines.stack import LayerStack
from skippy_stage.settings import WeightFormat
from skippy_stage.weights import Checkpoint, MtpWeights
from skippy_stage.weights.checkpoint import EMBEDDING, HEAD, MTP_PREFIX, mtp_tensors


class MtpHead:
    """The head of one model. Its layer is the stack's layer ``layer``; its KV lies in the sequences' own blocks."""

    def __init__(
        self,
        weights: MtpWeights,
        checkpoint: Checkpoint,
        form: WeightFormat,
        device: torch.device,
        compute: torch.dtype,
        sequences: SequenceStore,
        embedding: npt.NDArray[np.generic] | None,
        head: Linear,
        layer: int,
    ) -> None:
        """``embedding`` is the first stage's table where this stage is that too; ``head`` the output head."""
        prefix = f"{MTP_PREFIX}0."

        def norm(name: str) -> torch.Tensor:
            return torch.from_numpy(np.array(weights.tensor(f"{prefix}{name}.weight"))).to(device)

        self._layers = range(layer, layer + 1)
        self._device, self._compute = device, compute
        self._sequences = sequences
        self._hidden_norm, self._token_norm = norm("hidden_layernorm"), norm("token_layernorm")
        self._final_norm = norm("final_layernorm")
        name = f"{prefix}input_proj.weight"
        self._join = make_linear(name, weights.tensor(name), None, form, device)
        size = {"f32": 4, "f16": 2, "int8": 1}[form]
        self.weight_bytes = (
            sum(int(np.prod(shape)) for shape in mtp_tensors(checkpoint.config).values()) * size
        )
        if embedding is None:
            table = checkpoint.tensor(EMBEDDING)
            if form != "f32":
                check_f16_range(EMBEDDING, table)
            embedding = table.astype(np.float32 if form == "f32" else np.float16)
            self.weight_bytes += embedding.nbytes
        self._embedding: npt.NDArray[Any] = embedding
        self._tokens, self._head = weights.draft_tokens, head
        if self._tokens is not None:
            part = checkpoint.tensor(HEAD)[self._tokens]
            self._head = make_linear(HEAD, part, None, form, device)
            self.weight_bytes += part.size * size

    def draft(
        self, stack: LayerStack, hidden: torch.Tensor, items: Sequence[DraftRows]
    ) -> list[tuple[int, ...]]:
        """See StageEngine.draft; ``hidden`` is ``[rows of the last batch, hidden]`` behind the final norm."""
        batch = self._sequences.locate(
            [SequenceRows(item.sequence, item.past, len(item.next_tokens)) for item in items]
        )
        rows = np.concatenate([np.arange(len(item.next_tokens)) + item.start for item in items])
        tokens = np.concatenate([np.asarray(item.next_tokens, np.int64) for item in items])
        if len(rows) != len(hidden):
            hidden = hidden[torch.from_numpy(rows).to(self._device)]
        last = np.cumsum([len(item.next_tokens) for item in items]) - 1
        output = self._run(stack, hidden, tokens, batch)[torch.from_numpy(last).to(self._device)]
        drafted: list[list[int]] = [[] for _ in items]
        held = [self._sequences.cached(item.sequence) for item in items]
        ends = [item.past + len(item.next_tokens) for item in items]
        room = [h + self._sequences.room(item.sequence) for h, item in zip(held, items, strict=True)]
        # A draft behind the first needs a position of its own, behind the rows that the head has seen.
        wanted = [min(item.drafts, 1 + r - e) for item, r, e in zip(items, room, ends, strict=True)]
        alive = [i for i, count in enumerate(wanted) if count > 0]
        output = self._pick(output, alive, len(items))
        try:
            self._lengthen(stack, {i: ends[i] + wanted[i] - 1 for i in alive}, items, held)
            while alive:
                hidden = stack.normalise(output, self._final_norm)
                for i, token in zip(alive, self._tokens_of(hidden), strict=True):
                    drafted[i].append(token)
                going = [i for i in alive if len(drafted[i]) < wanted[i]]
                if not going:
                    break
                hidden = self._pick(hidden, [alive.index(i) for i in going], len(alive))
                alive = going
                batch = self._sequences.locate(
                    [SequenceRows(items[i].sequence, ends[i] + len(drafted[i]) - 1, 1) for i in alive]
                )
                output = self._run(stack, hidden, np.array([drafted[i][-1] for i in alive]), batch)
        finally:
            for item, length in zip(items, held, strict=True):
                self._sequences.cut(item.sequence, length)
        return [tuple(tokens) for tokens in drafted]

    def _lengthen(
        self, stack: LayerStack, ends: dict[int, int], items: Sequence[DraftRows], held: Sequence[int]
    ) -> None:
        """Give sequences the positions up to ``ends`` that they do not have."""
        missing = [
            SequenceRows(items[i].sequence, held[i], end - held[i])
            for i, end in ends.items()
            if end > held[i]
        ]
        if missing:
            stack.copy_blocks(self._sequences.extend(missing).copies)

    def _run(
        self, stack: LayerStack, hidden: torch.Tensor, tokens: npt.NDArray[np.int64], batch: BatchRows
    ) -> torch.Tensor:
        """The head's layer over rows and the tokens that follow them; the residual stream behind it."""
        embedded = torch.from_numpy(self._embedding[tokens].astype(np.float32)).to(self._device)
        joined = torch.cat(
            [stack.normalise(hidden, self._hidden_norm), stack.normalise(embedded, self._token_norm)], 1
        )
        x = self._join(joined.to(self._compute)).float()
        stack.run(x, batch, self._layers)
        return x

    def _tokens_of(self, hidden: torch.Tensor) -> list[int]:
        best = self._head(hidden.to(self._compute)).argmax(1).cpu().numpy()
        tokens: list[int] = (best if self._tokens is None else self._tokens[best]).tolist()
        return tokens

    def _pick(self, rows: torch.Tensor, which: Sequence[int], count: int) -> torch.Tensor:
        return (
            rows if len(which) == count else rows[torch.tensor(which, device=self._device, dtype=torch.long)]
        )
