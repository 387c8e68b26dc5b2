"""The definition of lightning attention: a loop over tokens. Float32, or float64 if given it."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.linear_attention import check_shapes
from recurra.ops.precision import wide
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.reference import load, store
from recurra.types import Chunks


def lightning_attention_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    slots: Tensor,
    *,
    scale: float = 1.0,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionUpdate`."""
    check_shapes(q, k, v, log_decay, state)
    dtype = wide(q, state)
    decay = torch.exp(log_decay.to(dtype))[:, None, None]
    new = decay * load(state, state_scale, slots, dtype) + k.to(dtype)[..., None] * v.to(dtype)[:, :, None, :]
    store(state, state_scale, slots, new, rounding)
    return (scale * (q.to(dtype)[..., None] * new).sum(2)).to(v.dtype)


def lightning_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    scale: float = 1.0,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionVarlen`."""
    del chunks
    check_shapes(q, k, v, log_decay, state)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    bounds = cu_seqlens.tolist()
    zero = slots.new_zeros(1)
    for s in range(slots.shape[0]):
        if bounds[s] == bounds[s + 1]:
            continue
        # The carried state stays wide between tokens; it is rounded once, at the sequence's end.
        slot = slots[s : s + 1]
        carried = load(state, state_scale, slot, wide(q, state))
        if not has_state[s]:
            carried = torch.zeros_like(carried)
        for t in range(bounds[s], bounds[s + 1]):
            row = slice(t, t + 1)
            out[row] = lightning_attention_update(
                carried, q[row], k[row], v[row], log_decay, zero, scale=scale
            )
        store(state, state_scale, slot, carried, rounding)
    return out
