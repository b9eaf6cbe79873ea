"""The seam where quantized or fused kernels slot in: a linear layer is a callable from [T, in] to [T, out].

A row of the output is made of the same row of the input only. In which order its products are added is the kernel's
choice, by the number of rows: oneDNN's fp32 rows differ in their last bits between batch sizes on AVX-512.
"""

from collections.abc import Callable

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]  # [T, in] -> [T, out]
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # (weight [out, in], bias [out] or None)


class DenseLinear:
    """y = x W^T + b in the weight's own dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """The same in fp32 on a CPU, with the weight in oneDNN's own blocked layout, made once at load.

    A matmul that finds its weight packed need not do that on every call: 1.4 to 2 times the speed of `DenseLinear` for
    the few rows of a decode step, measured on AVX2. The operators are those that torch.compile's freezing emits.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return out


# The batch that the packed layout is chosen for: a decode step of some sequences.
PACKED_ROWS = 8


def dense(device: torch.device, dtype: torch.dtype) -> MakeLinear:
    """Dense layers on one device; packed where that is known to be faster."""
    packed = device.type == "cpu" and dtype is torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    layer = PackedLinear if packed else DenseLinear

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        moved = weight.to(device, dtype).contiguous()
        return layer(moved, None if bias is None else bias.to(device, dtype))

    return make
