"""The seam where quantized or fused kernels slot in: a linear layer is a callable from [T, in] to [T, out].

A row of the output depends on the same row of the input only, whatever shares the batch.
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


def dense(device: torch.device, dtype: torch.dtype) -> MakeLinear:
    """Plain dense layers on one device."""

    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        moved = weight.to(device, dtype).contiguous()
        return DenseLinear(moved, None if bias is None else bias.to(device, dtype))

    return make
