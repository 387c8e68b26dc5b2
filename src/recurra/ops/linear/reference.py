"""The definition of the matrix product: everything widened to x's dtype, float32 at least."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.Linear`."""
    dtype = torch.float64 if torch.float64 in (x.dtype, weight.dtype) else torch.float32
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).to(x.dtype)


def linear_scaled(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.LinearScaled`."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    product = F.linear(x.to(dtype), weight.to(dtype)) * scale.to(dtype).view(-1)
    return (product if bias is None else product + bias.to(dtype)).to(x.dtype)
