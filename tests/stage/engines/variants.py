"""The engines that must pass the conformance suite, and how closely each must agree with itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import torch
from skippy_stage.engines import create_engine
from skippy_stage.engines.base import StageEngine
from skippy_stage.settings import StageSettings

BLOCK: Final = 4
"""Tokens per KV block."""
KV_TOKENS: Final = 256


@dataclass(frozen=True, slots=True)
class Variant:
    """One engine in one format. Differences are relative: the largest one over the largest value."""

    name: str
    settings: Mapping[str, Any]
    batching: float
    """Allowed between the same rows in different batches or chunks."""
    repeat: float = 0.0
    """Allowed between the same calls made twice, with other things in between, or on cut layers."""
    create: Callable[[StageSettings], StageEngine] = create_engine
    gpu: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What ``info`` must say."""

    def make(self, folder: Path, first: int, last: int, **settings: Any) -> StageEngine:
        """Load layers [first, last) of the model in ``folder``."""
        values: dict[str, Any] = {
            "name": f"{self.name}[{first}:{last}]",
            "model": str(folder),
            "first_layer": first,
            "last_layer": last,
            "threads": 1,
            "kv_tokens": KV_TOKENS,
            "kv_block_tokens": BLOCK,
            **self.settings,
            **settings,
        }
        return self.create(StageSettings(**values))


def _without_numba(settings: StageSettings) -> StageEngine:
    """The stack of plain torch operations, which CUDA and a CPU without numba run."""
    with patch("importlib.util.find_spec", return_value=None):
        return create_engine(settings)


VARIANTS: Final = (
    Variant("f32", {"weights": "f32"}, 2e-6, fields={"engine": "torch-cpu-f32", "link_dtype": "f32"}),
    Variant("f16", {"weights": "f16"}, 3e-6, fields={"engine": "torch-cpu-f16", "link_dtype": "f32"}),
    # Activations share one scale per batch: a neighbour moves a row by 8-bit rounding.
    Variant("int8", {"weights": "int8"}, 0.15, fields={"engine": "torch-cpu-int8", "link_dtype": "f32"}),
    Variant("f32-link-f16", {"weights": "f32", "link_dtype": "f16"}, 4e-3, fields={"link_dtype": "f16"}),
    Variant("f16-link-bf16", {"weights": "f16", "link_dtype": "bf16"}, 4e-2, fields={"link_dtype": "bf16"}),
    Variant("plain-f32", {"weights": "f32"}, 2e-6, create=_without_numba),
    Variant("plain-f16", {"weights": "f16"}, 3e-6, create=_without_numba),
    Variant("cuda-f32", {"weights": "f32", "device": "cuda"}, 1e-5, 1e-6, gpu=True),
    Variant("cuda-f16", {"weights": "f16", "device": "cuda"}, 2e-2, 1e-3, gpu=True),
)


def parameters() -> list[Any]:
    """The variants as pytest parameters; those for a GPU run where there is one."""
    without_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return [
        pytest.param(variant, id=variant.name, marks=[pytest.mark.gpu, without_gpu] if variant.gpu else [])
        for variant in VARIANTS
    ]
