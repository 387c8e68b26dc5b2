"""The product for many rows, as in prefill: PyTorch's float32 matrix product, weights widened in pieces.

Its rows don't depend on each other's number from 16 rows up (measured with MKL, 16 to 700 rows), so a
prompt's numbers don't depend on its company; below ``MANY_ROWS`` the small-batch kernel, whose rows never
do, is as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: From here PyTorch's product is faster than the small-batch kernel (docs/lab-notes/cpu-prefill.md).
MANY_ROWS = 128
#: Weight rows widened at once: the piece stays in the second-level cache while it is multiplied.
_PIECE = 512


def many_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for float32 x (rows, columns), float32 or 16-bit weight; float32 result."""
    if weight.dtype == torch.float32:
        return torch.nn.functional.linear(x, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    for first in range(0, weight.shape[0], _PIECE):
        piece = slice(first, first + _PIECE)
        torch.mm(x, weight[piece].float().T, out=out[:, piece])
    return out if bias is None else out.add_(bias)
