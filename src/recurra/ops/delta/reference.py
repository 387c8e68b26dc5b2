"""The definition of the gated delta rule: a loop over tokens. Float32, or float64 if given it."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.delta import NORM_EPS, check_shapes
from recurra.ops.precision import wide
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.reference import load, store
from recurra.types import Chunks


def gated_delta_rule_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.delta.GatedDeltaRuleUpdate`."""
    check_shapes(q, k, v, g, beta, state)
    dtype = wide(q, state)
    heads_a_key = v.shape[1] // q.shape[1]
    query, key = (t.to(dtype).repeat_interleave(heads_a_key, 1) for t in (q, k))
    if qk_l2norm:
        query, key = (t / torch.sqrt((t * t).sum(-1, keepdim=True) + NORM_EPS) for t in (query, key))
    decay = torch.exp(g.to(dtype))
    decay = decay[..., None, None] if g.dim() == 2 else decay[..., None]
    decayed = decay * load(state, state_scale, slots, dtype)
    held = (key[..., None] * decayed).sum(2)
    correction = beta.to(dtype)[..., None] * (v.to(dtype) - held)
    new = decayed + key[..., None] * correction[:, :, None, :]
    store(state, state_scale, slots, new, rounding)
    return (scale * (query[..., None] * new).sum(2)).to(v.dtype)


def gated_delta_rule_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    scale: float,
    qk_l2norm: bool,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.delta.GatedDeltaRuleVarlen`."""
    del chunks
    check_shapes(q, k, v, g, beta, state)
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
            out[row] = gated_delta_rule_update(
                carried, q[row], k[row], v[row], g[row], beta[row], zero, scale=scale, qk_l2norm=qk_l2norm
            )
        store(state, state_scale, slot, carried, rounding)
    return out
