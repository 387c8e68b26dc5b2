"""The matrix product on GPUs, by PyTorch's cuBLAS, which accumulates in float32."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.Linear`. A weight of another dtype is converted at each call."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
