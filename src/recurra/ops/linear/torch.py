"""The matrix product on GPUs, by PyTorch's cuBLAS, which accumulates in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.Linear`. A weight of another dtype is converted at each call."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def linear_scaled(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.LinearScaled`, for float8_e4m3fn weights of multiples of 16 rows and columns.

    Rows of x are scaled to the format's range and rounded to it too, as the hardware multiplies no other: what such
    a checkpoint was made for.
    """
    assert weight.dtype == torch.float8_e4m3fn, weight.dtype
    by_row = (x.abs().amax(1, keepdim=True).float() / _LARGEST).clamp(min=_SMALLEST)
    narrow = (x.float() / by_row).to(torch.float8_e4m3fn)
    product = torch._scaled_mm(
        narrow, weight.t(), scale_a=by_row, scale_b=scale.view(1, -1), out_dtype=torch.bfloat16
    )
    return (product if bias is None else product + bias).to(x.dtype)


_LARGEST, _SMALLEST = 448.0, 2.0**-100
