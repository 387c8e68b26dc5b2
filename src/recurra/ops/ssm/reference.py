"""The definition of the selective recurrence: a loop over tokens. Float32, or float64 if given it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.ops.precision import wide
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.reference import load, store
from recurra.types import Chunks

_NO_LIMIT = (0.0, float("inf"))


def _step_size(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float], dtype: torch.dtype
) -> Tensor:
    dt = dt.to(dtype)
    if bias is not None:
        dt = dt + bias.to(dtype)
    if softplus:
        dt = F.softplus(dt)
    return dt if limit == _NO_LIMIT else dt.clamp(*limit)


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    slots: Tensor,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.ssm.SelectiveStateUpdate`."""
    dtype = wide(x, ssm_state, A)
    state = load(ssm_state, state_scale, slots, dtype)
    dt = _step_size(dt, dt_bias, dt_softplus, dt_limit, dtype)
    xw, Bw, Cw, A = x.to(dtype), B.to(dtype), C.to(dtype), A.to(dtype)
    if ssm_state.dim() == 3:  # Mamba-1: one dt a channel
        decay = torch.exp(dt[:, :, None] * A)
        Bw, Cw = Bw[:, None, :], Cw[:, None, :]
        dx = (dt * xw)[:, :, None]
    else:  # Mamba-2: one dt a head, groups of heads share B and C
        per_group = x.shape[1] // B.shape[1]
        Bw = Bw.repeat_interleave(per_group, dim=1)[:, :, None, :]
        Cw = Cw.repeat_interleave(per_group, dim=1)[:, :, None, :]
        decay = torch.exp(dt * A)[:, :, None, None]
        dx = (dt[:, :, None] * xw)[:, :, :, None]
    state = decay * state + dx * Bw
    y = (state * Cw).sum(-1)
    if D is not None:
        Dw = D.to(dtype)
        y = y + (Dw if Dw.shape == x.shape[1:] else Dw[:, None]) * xw
    if z is not None:
        y = y * F.silu(z.to(dtype))
    store(ssm_state, state_scale, slots, state, rounding)
    return y.to(x.dtype)


def selective_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    dt_softplus: bool = True,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.ssm.SelectiveScanVarlen`."""
    return _scan(
        x,
        dt,
        A,
        B,
        C,
        D,
        z,
        dt_bias,
        ssm_state,
        cu_seqlens,
        slots,
        has_state,
        dt_softplus,
        _NO_LIMIT,
        state_scale,
        rounding,
    )


def mamba_chunk_scan_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    dt_bias: Tensor | None,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.ssm.SSDVarlen`."""
    return _scan(
        x,
        dt,
        A,
        B,
        C,
        D,
        None,
        dt_bias,
        ssm_state,
        cu_seqlens,
        slots,
        has_state,
        dt_softplus,
        dt_limit,
        state_scale,
        rounding,
    )


def _scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    ssm_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    state_scale: Tensor | None,
    rounding: Rounding,
) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    bounds = cu_seqlens.tolist()
    zero = slots.new_zeros(1)
    for s in range(slots.shape[0]):
        if bounds[s] == bounds[s + 1]:
            continue
        # The carried state stays wide between tokens; it is rounded once, at the sequence's end.
        slot = slots[s : s + 1]
        state = load(ssm_state, state_scale, slot, wide(x, ssm_state, A))
        if not has_state[s]:
            state = torch.zeros_like(state)
        for t in range(bounds[s], bounds[s + 1]):
            row = slice(t, t + 1)
            out[row] = selective_state_update(
                state, x[row], dt[row], A, B[row], C[row], D, z[row] if z is not None else None,
                dt_bias, zero, dt_softplus=dt_softplus, dt_limit=dt_limit,
            )  # fmt: skip
        store(ssm_state, state_scale, slot, state, rounding)
    return out
