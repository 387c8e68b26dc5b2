"""Root-mean-square norms: plain, with the residual added first, and gated by group (Mamba-2)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RMSNorm(Protocol):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, computed in float32.

    Args:
        x: (rows, width), any row stride.
        weight: (width,) or None for a norm without weights (FalconMamba's B, C and dt norms).

    Returns:
        (rows, width) in x's dtype.
    """

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor: ...


class RMSNormGated(Protocol):
    """RMS norm over each group of the last dimension, gated by silu(z).

    With ``norm_before_gate`` False (Mamba-2): ``norm(x * silu(z)) * weight``; with True:
    ``norm(x) * weight * silu(z)``.

    Args:
        x: (rows, width). z: (rows, width), any row stride, or None for no gate.
        weight: (width,). group_size: columns normalised together; divides width.

    Returns:
        (rows, width) in x's dtype.
    """

    def __call__(
        self,
        x: Tensor,
        z: Tensor | None,
        weight: Tensor,
        eps: float,
        group_size: int,
        *,
        norm_before_gate: bool = False,
    ) -> Tensor: ...
