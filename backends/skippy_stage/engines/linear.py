"""Matrix products ``x @ weight.T + bias`` in the formats a stage can hold its weights in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from skippy_stage.errors import SkippyError, UnsupportedModel
from skippy_stage.settings import WeightFormat

Linear = Callable[[torch.Tensor], torch.Tensor]
"""``[rows, in]`` float32 (float16 where the weights are float16 on CUDA) to ``[rows, out]``."""

F32 = npt.NDArray[np.float32]

_F16_MAX: Final = float(np.finfo(np.float16).max)


def make_linear(name: str, weight: F32, bias: F32 | None, form: WeightFormat, device: torch.device) -> Linear:
    """Make the product for ``weight`` ``[out, in]`` and ``bias`` ``[out]``.

    Raises UnsupportedModel naming the tensor when float16 cannot hold its values, and SkippyError when
    this build of torch lacks the kernels.
    """
    if form == "f16":
        check_f16_range(name, weight)
    # Copied where it is a view of a mapped file, which is slow to touch and read-only.
    matrix = torch.from_numpy(np.require(weight, requirements=["C", "W"]))
    offset = None if bias is None else torch.from_numpy(np.array(bias))
    if device.type == "cpu" and form == "f16":
        return _packed_f16(matrix, offset)
    if device.type == "cpu" and form == "int8":
        return _dynamic_int8(matrix, offset)
    if form == "int8":
        raise SkippyError("weights 'int8' are for the CPU; on CUDA f16 or f32")
    kind = torch.float16 if form == "f16" else torch.float32
    matrix = matrix.to(device, kind)
    offset = None if offset is None else offset.to(device, kind)

    def dense(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, matrix, offset)

    return dense


def check_f16_range(name: str, weight: F32) -> None:
    """Raise UnsupportedModel when a weight would become infinite in float16."""
    largest = float(np.abs(weight).max(initial=0.0))
    if not largest <= _F16_MAX:
        raise UnsupportedModel(f"tensor {name!r} holds {largest:.6g}, beyond float16: use weights = 'f32'")


def _packed_f16(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """fbgemm's packed half precision: weights in 16 bits, activations and sums in float32."""
    _need_fbgemm("f16")
    packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
    product = torch.ops.quantized.linear_dynamic_fp16

    def linear(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = product(x, packed)
        return result

    return linear


def _dynamic_int8(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    """8-bit weights with a scale per output, activations quantised on the way.

    A row's result depends on its neighbours at the level of 8-bit rounding: fast, but not for comparing
    texts.
    """
    _need_fbgemm("int8")
    scales = (weight.abs().amax(1).double() / 127).clamp_min(1e-12)
    with warnings.catch_warnings():
        # torch announces that quantised tensors will go; the packed product takes nothing else.
        warnings.filterwarnings("ignore", "torch.quantize_per", UserWarning)
        quantised = torch.quantize_per_channel(
            weight, scales, torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8
        )
    packed = torch.ops.quantized.linear_prepack(quantised, None)
    product = torch.ops.quantized.linear_dynamic

    def linear(x: torch.Tensor) -> torch.Tensor:
        # The product quantises all rows by one scale, and the first tokens of a text have activations
        # hundreds of times larger than the rest: unscaled they would leave other rows no bits.
        size = x.abs().amax(1, keepdim=True).clamp_min_(1e-30) if len(x) > 1 else None
        # Reduced range: without VNNI, sums of two 8-bit products saturate at 16 bits.
        result: torch.Tensor = product(x if size is None else x / size, packed, True)
        if size is not None:
            result *= size
        return result if bias is None else result.add_(bias)

    return linear


def _need_fbgemm(form: str) -> None:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        raise SkippyError(f"weights {form!r} need a torch with fbgemm (x86); use weights = 'f32'")
