"""The definition of the causal convolution, slow and obvious. Computes in float32, or float64 if given it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.ops.precision import wide
from recurra.types import Chunks


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    silu: bool,
) -> Tensor:
    """See :class:`recurra.ops.conv1d.CausalConv1dVarlen`."""
    del chunks
    dtype = wide(x, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    width = weight.shape[1]
    bounds = cu_seqlens.tolist()
    for s, slot in enumerate(slots.tolist()):
        begin, end = bounds[s], bounds[s + 1]
        if begin == end:
            continue
        window = (
            conv_state[slot].to(dtype) if has_state[s] else x.new_zeros(x.shape[1], width - 1, dtype=dtype)
        )
        u = torch.cat([window, x[begin:end].to(dtype).T], dim=1)  # (channels, W - 1 + length)
        y = (u.unfold(1, width, 1) * weight.to(dtype)[:, None, :]).sum(-1)
        if bias is not None:
            y = y + bias.to(dtype)[:, None]
        out[begin:end] = (F.silu(y) if silu else y).T.to(x.dtype)
        conv_state[slot] = u[:, u.shape[1] - (width - 1) :].to(conv_state.dtype)
    return out


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    *,
    silu: bool,
) -> Tensor:
    """See :class:`recurra.ops.conv1d.CausalConv1dUpdate`."""
    dtype = wide(x, weight)
    index = slots.long()
    u = torch.cat([conv_state[index].to(dtype), x.to(dtype)[:, :, None]], dim=2)  # (S, channels, W)
    y = (u * weight.to(dtype)).sum(-1)
    if bias is not None:
        y = y + bias.to(dtype)
    conv_state[index] = u[:, :, 1:].to(conv_state.dtype)
    return (F.silu(y) if silu else y).to(x.dtype)
