"""The definition: a sum, then a norm."""

from __future__ import annotations

from torch import Tensor

from recurra.ops.norm.reference import rms_norm
from recurra.ops.precision import wide


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :class:`recurra.ops.add_norm.AddRMSNorm`."""
    added = (residual.to(wide(residual)) + x).to(residual.dtype)
    return rms_norm(added.to(wide(added)), weight, eps).to(x.dtype), added
