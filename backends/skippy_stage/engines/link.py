"""The type in which the residual stream leaves a stage, and rounding to it."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.engines.base import Hidden
from skippy_stage.errors import SkippyError
from skippy_stage.protocol import LINK_DTYPES

_TORCH: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class Link:
    """Conversion of float32 rows to and from one link dtype.

    With a 16-bit link the residual stream is rounded to it after every layer, also where the model is
    not cut, so that results do not depend on the cut.
    """

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self._torch = _TORCH[dtype]
        self._numpy: np.dtype[np.generic] = np.dtype(LINK_DTYPES[dtype][1])

    @property
    def rounds(self) -> bool:
        """The link is narrower than float32."""
        return self.dtype != "f32"

    def round_(self, x: torch.Tensor) -> None:
        """Round float32 rows in place to what the link can carry."""
        if self.rounds:
            x.copy_(x.to(self._torch))

    def encode(self, x: torch.Tensor) -> Hidden:
        """Rows ``[rows, hidden_size]`` float32 as an array of the link dtype, not shared with ``x``."""
        rows = x.to(self._torch, copy=True).cpu()
        return rows.view(torch.uint16).numpy() if self.dtype == "bf16" else rows.numpy()

    def decode(self, rows: Hidden, hidden_size: int) -> torch.Tensor:
        """Received rows as a new float32 tensor on the CPU; raises SkippyError for another dtype or shape."""
        if rows.dtype != self._numpy or rows.ndim != 2 or rows.shape[1] != hidden_size:
            raise SkippyError(
                f"hidden rows are {rows.dtype} {list(rows.shape)}, "
                f"expected {self._numpy} [rows, {hidden_size}]"
            )
        plain: npt.NDArray[np.generic] = np.array(rows, order="C")
        tensor = torch.from_numpy(plain)
        return (tensor.view(torch.bfloat16) if self.dtype == "bf16" else tensor).to(torch.float32)
