"""The weights of a multi-token prediction head: out of the model's own checkpoint, or a file beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.weights.checkpoint import MTP_PREFIX, Checkpoint, mtp_tensors
from skippy_stage.weights.safetensors_file import SafetensorsFile

DRAFT_TOKENS: Final = f"{MTP_PREFIX}0.draft_token_ids"
"""Optional integers ``[n]``: the only tokens that the head drafts, so that it reads a part of the output head."""


class MtpWeights(Protocol):
    """Where the tensors of head 0 come from."""

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor by its published name."""
        ...

    @property
    def draft_tokens(self) -> npt.NDArray[np.int64] | None:
        """Token ids that the head may draft, ascending; None for all."""
        ...


class _OwnHead:
    def __init__(self, checkpoint: Checkpoint) -> None:
        self.tensor = checkpoint.tensor
        self.draft_tokens = None


class MtpHeadFile:
    """A head in a ``.safetensors`` file. Raises for missing, misshapen and unknown tensors by name."""

    def __init__(self, path: Path, checkpoint: Checkpoint) -> None:
        self._file = SafetensorsFile(path)
        self.draft_tokens: npt.NDArray[np.int64] | None = None
        expected = mtp_tensors(checkpoint.config)
        entries = self._file.entries
        for name, shape in expected.items():
            if name not in entries:
                raise SkippyError(f"{path}: tensor {name!r} is missing")
            if entries[name].shape != shape:
                raise UnsupportedModel(
                    f"{path}: tensor {name!r} has shape {list(entries[name].shape)}, expected {list(shape)}"
                )
        for name in entries:
            if name not in expected and name != DRAFT_TOKENS:
                raise UnsupportedModel(f"{path}: tensor {name!r} is not computed")
        if DRAFT_TOKENS in entries:
            tokens = self._file.integers(DRAFT_TOKENS)
            last = checkpoint.config.vocab_size - 1
            if tokens.ndim != 1 or not len(tokens) or tokens[0] < 0 or tokens[-1] > last:
                raise UnsupportedModel(f"{path}: {DRAFT_TOKENS}: expected token ids from 0 to {last}")
            if (np.diff(tokens) <= 0).any():
                raise UnsupportedModel(f"{path}: {DRAFT_TOKENS}: expected ascending token ids")
            self.draft_tokens = tokens

    def tensor(self, name: str) -> npt.NDArray[np.float32]:
        """See MtpWeights."""
        return self._file.floats(name)


def open_mtp_head(checkpoint: Checkpoint, file: Path | None) -> MtpWeights | None:
    """The head of a model: that of ``file`` where one is given, else the checkpoint's own, else None."""
    if file is not None:
        return MtpHeadFile(file, checkpoint)
    return _OwnHead(checkpoint) if checkpoint.config.mtp_layers else None
