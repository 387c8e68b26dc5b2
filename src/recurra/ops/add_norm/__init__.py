"""The seam between two blocks: add the last one's output to the residual stream, and normalise the sum."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AddRMSNorm(Protocol):
    """``r = residual + x``, and ``r / sqrt(mean(r^2) + eps) * weight`` over the last dimension.

    The sum is computed in float32 and rounded to the residual's dtype; the norm is of what was rounded.

    Args:
        x: (rows, width), a block's output; unit column stride.
        residual: (rows, width), contiguous.
        weight: (width,).

    Returns:
        the norm in x's dtype, and the new residual in the old one's; both new, (rows, width).
    """

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
