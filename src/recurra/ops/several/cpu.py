"""A step with several tokens on the CPU: the one-token and packed kernels on float32 copies of the states.

A copy is made once a step and stays in the second-level cache while its tokens pass, so what is added to the
one-token operators is one more pass over the states.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.conv1d.cpu import causal_conv1d_varlen
from recurra.ops.rounding import NEAREST, Rounding, check_state
from recurra.ops.rounding.cpu import store_states, widen_states
from recurra.ops.several.first_slot import store_everywhere
from recurra.ops.ssm.cpu import selective_state_update
from recurra.types import SCRATCH_SLOT, Chunks


def _live(slots: Tensor, pad_slot: int) -> Tensor:
    return (slots >= 0) & (slots != pad_slot)


def _one_chunk_each(cu_seqlens: Tensor) -> Chunks:
    lengths = cu_seqlens.diff()
    seqs = torch.arange(lengths.shape[0] + 1, dtype=torch.int32)
    return Chunks(int(lengths.max()), seqs[:-1], cu_seqlens[:-1], lengths, seqs)


def causal_conv1d_update_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    sources: Tensor,
    targets: Tensor,
    accepted: Tensor | None,
    *,
    silu: bool,
    pad_slot: int = SCRATCH_SLOT,
) -> Tensor:
    """See :class:`recurra.ops.several.CausalConv1dUpdateVarlen`."""
    taps, length = weight.shape[1] - 1, conv_state.shape[2]
    out = torch.zeros(x.shape, dtype=x.dtype)
    lengths = cu_seqlens.diff()
    rows = (_live(sources, pad_slot) & (lengths > 0)).nonzero().flatten()
    if rows.shape[0] == 0:
        return out
    cu_seqlens = cu_seqlens.to(torch.int32)
    everything = torch.zeros(sources.shape[0] + 1, conv_state.shape[1], length)
    everything[1:][rows] = conv_state[sources[rows].long()].float()
    first = torch.full_like(rows, length - taps) if accepted is None else accepted[rows].long() - 1
    picked = first[:, None, None] + torch.arange(taps)
    windows = torch.zeros(everything.shape[0], everything.shape[1], taps)
    windows[1:][rows] = everything[1:][rows].gather(2, picked.expand(-1, everything.shape[1], -1))
    before = windows[1:][rows].clone()
    known = torch.zeros(sources.shape[0], dtype=torch.bool)
    known[rows] = True
    y = causal_conv1d_varlen(
        x, weight, bias, windows, cu_seqlens, torch.arange(1, sources.shape[0] + 1, dtype=torch.int32), known,
        _one_chunk_each(cu_seqlens), silu=silu,
    )  # fmt: skip
    for i, s in enumerate(rows.tolist()):
        begin, end = int(cu_seqlens[s]), int(cu_seqlens[s + 1])
        out[begin:end] = y[begin:end]
        target = int(targets[s])
        if target < 0 or target == pad_slot:
            continue
        new = x[begin:end].float().T
        kept = everything[1 + s] if accepted is None else before[i][:, 1:]
        moved = torch.cat([kept, new], dim=1)
        moved = moved[:, -length:] if accepted is None else moved
        conv_state[target, :, : moved.shape[1]] = moved.to(conv_state.dtype)
    return out


def selective_state_update_varlen(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    cu_seqlens: Tensor,
    sources: Tensor,
    targets: Tensor,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    pad_slot: int = SCRATCH_SLOT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.several.SelectiveStateUpdateVarlen`."""
    check_state(ssm_state, state_scale)
    out = torch.zeros(x.shape, dtype=x.dtype)
    lengths, begins = cu_seqlens.diff(), cu_seqlens[:-1].long()
    rows = _live(sources, pad_slot).nonzero().flatten()
    if rows.shape[0] == 0:
        return out
    read = sources[rows].to(torch.int32).contiguous()
    # Row 0 is the update's padding row: nobody's state may be there.
    work = torch.empty(rows.shape[0] + 1, *ssm_state.shape[1:])
    work[1:] = widen_states(_whole_rows(ssm_state), state_scale, read)
    for j in range(int(lengths[rows].max())):
        live = lengths[rows] > j
        tokens = begins[rows[live]] + j
        slots = (live.nonzero().flatten() + 1).to(torch.int32)
        out[tokens] = selective_state_update(
            work, x[tokens], dt[tokens], A, B[tokens], C[tokens], D, None if z is None else z[tokens], dt_bias,
            slots, dt_softplus=dt_softplus, dt_limit=dt_limit,
        )  # fmt: skip
        written = targets[rows[live], j]
        kept = _live(written, pad_slot)
        _keep(ssm_state, state_scale, written[kept], work[slots[kept].long()], rounding, pad_slot)
    return out


def _whole_rows(state: Tensor) -> Tensor:
    assert state[0].is_contiguous(), f"strides {state.stride()}: each slot's state must be contiguous"
    return state


def _keep(
    state: Tensor, scale: Tensor | None, slots: Tensor, value: Tensor, rounding: Rounding, pad_slot: int
) -> None:
    if slots.shape[0] == 0:
        return
    every = torch.arange(slots.shape[0] + 1, dtype=torch.int32)
    store_everywhere(
        store_states, state, scale, slots.to(torch.int32).contiguous(), value, every, rounding, pad_slot
    )
