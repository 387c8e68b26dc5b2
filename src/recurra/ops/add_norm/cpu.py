"""On the CPU: PyTorch's sum, which is as fast as memory, and our norm."""

from __future__ import annotations

from torch import Tensor

from recurra.ops.norm.cpu import rms_norm


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :class:`recurra.ops.add_norm.AddRMSNorm`."""
    added = residual + x
    return rms_norm(added, weight, eps).to(x.dtype), added
