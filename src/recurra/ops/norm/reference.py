"""The definition of the norms. Float32, or float64 if given it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.ops.precision import wide


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See :class:`recurra.ops.norm.RMSNorm`."""
    x_wide = x.to(wide(x))
    y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype)


def rms_norm_gated(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int,
    *,
    norm_before_gate: bool = False,
) -> Tensor:
    """See :class:`recurra.ops.norm.RMSNormGated`."""
    x_wide = x.to(wide(x))
    gate = None if z is None else F.silu(z.to(x_wide.dtype))
    if gate is not None and not norm_before_gate:
        x_wide = x_wide * gate
    grouped = x_wide.reshape(*x_wide.shape[:-1], -1, group_size)
    y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).reshape(x_wide.shape)
    y = y * weight.to(y.dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)
