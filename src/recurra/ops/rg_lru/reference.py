"""The definition of the real-gated linear recurrent unit: a loop over tokens. Float32, or float64 if given it."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.precision import wide
from recurra.ops.rg_lru import check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.reference import load, store
from recurra.types import Chunks


def _gates(
    x: Tensor, input_gate: Tensor, recurrent_gate: Tensor, log_decay: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The decay, the gated input, and what scales it."""
    log_a = log_decay.to(dtype) * torch.sigmoid(recurrent_gate.to(dtype))
    gated = torch.sigmoid(input_gate.to(dtype)) * x.to(dtype)
    return torch.exp(log_a), gated, torch.sqrt(-torch.expm1(2 * log_a))


def rg_lru_update(
    state: Tensor,
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    log_decay: Tensor,
    slots: Tensor,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.rg_lru.RGLRUUpdate`."""
    check_shapes(x, input_gate, recurrent_gate, log_decay, state)
    dtype = wide(x, state)
    a, gated, by = _gates(x, input_gate, recurrent_gate, log_decay, dtype)
    new = a * load(state, state_scale, slots, dtype).flatten(1) + by * gated
    store(state, state_scale, slots, new.view(-1, *state.shape[1:]), rounding)
    return new.to(x.dtype)


def rg_lru_varlen(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    log_decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.rg_lru.RGLRUVarlen`."""
    del chunks
    check_shapes(x, input_gate, recurrent_gate, log_decay, state)
    dtype = wide(x, state)
    a, gated, by = _gates(x, input_gate, recurrent_gate, log_decay, dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    bounds = cu_seqlens.tolist()
    for s in range(slots.shape[0]):
        if bounds[s] == bounds[s + 1]:
            continue
        slot = slots[s : s + 1]
        carried = load(state, state_scale, slot, dtype).flatten()
        for t in range(bounds[s], bounds[s + 1]):
            fresh = t == bounds[s] and not has_state[s]
            carried = gated[t] if fresh else a[t] * carried + by[t] * gated[t]
            out[t] = carried
        store(state, state_scale, slot, carried.view(1, *state.shape[1:]), rounding)
    return out
