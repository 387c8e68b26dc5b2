"""The definition of lightning attention: a loop over tokens. Float32, or float64 if given it."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.linear_attention import check_shapes
from recurra.ops.precision import wide
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
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionUpdate`."""
    check_shapes(q, k, v, log_decay, state)
    dtype = wide(q, state)
    index = slots.long()
    decay = torch.exp(log_decay.to(dtype))[:, None, None]
    new = decay * state[index].to(dtype) + k.to(dtype)[..., None] * v.to(dtype)[:, :, None, :]
    state[index] = new.to(state.dtype)
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
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionVarlen`."""
    del chunks
    check_shapes(q, k, v, log_decay, state)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    bounds = cu_seqlens.tolist()
    zero = slots.new_zeros(1)
    for s, slot in enumerate(slots.tolist()):
        if bounds[s] == bounds[s + 1]:
            continue
        # The carried state stays wide between tokens; it is rounded once, at the sequence's end.
        carried = state[slot : slot + 1].to(wide(q, state)).clone()
        if not has_state[s]:
            carried = torch.zeros_like(carried)
        for t in range(bounds[s], bounds[s + 1]):
            row = slice(t, t + 1)
            out[row] = lightning_attention_update(
                carried, q[row], k[row], v[row], log_decay, zero, scale=scale
            )
        state[slot] = carried[0].to(state.dtype)
    return out
