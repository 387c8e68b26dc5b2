"""The definition of the norms. Float32, or float64 if given it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See :class:`recurra.ops.norm.RMSNorm`."""
    wide = x.to(_wide(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
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
    wide = x.to(_wide(x))
    gate = None if z is None else F.silu(z.to(wide.dtype))
    if gate is not None and not norm_before_gate:
        wide = wide * gate
    grouped = wide.reshape(*wide.shape[:-1], -1, group_size)
    y = (grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)).reshape(wide.shape)
    y = y * weight.to(y.dtype)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)
