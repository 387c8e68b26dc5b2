"""The definition of a step with several tokens: a loop over sequences. Float32, or float64 if given it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.ops.precision import wide
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.reference import load, store
from recurra.ops.ssm.reference import selective_state_update
from recurra.types import SCRATCH_SLOT


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
    dtype = wide(x, weight)
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    taps, length = weight.shape[1] - 1, conv_state.shape[2]
    bounds = cu_seqlens.tolist()
    for s, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
        begin, end = bounds[s], bounds[s + 1]
        if source == pad_slot or source < 0 or begin == end:
            continue
        new = x[begin:end].to(dtype).T
        kept = conv_state[source].to(dtype)
        first = length - taps if accepted is None else int(accepted[s]) - 1
        u = torch.cat([kept[:, first : first + taps], new], dim=1)
        y = (u.unfold(1, taps + 1, 1) * weight.to(dtype)[:, None, :]).sum(-1)
        if bias is not None:
            y = y + bias.to(dtype)[:, None]
        out[begin:end] = (F.silu(y) if silu else y).T.to(x.dtype)
        moved = torch.cat([kept, new], dim=1)[:, -length:] if accepted is None else u[:, 1:]
        if target >= 0 and target != pad_slot:
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
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    bounds, zero = cu_seqlens.tolist(), sources.new_zeros(1)
    for s, source in enumerate(sources.tolist()):
        if source == pad_slot or source < 0:
            continue
        state = load(ssm_state, state_scale, sources[s : s + 1], wide(x, ssm_state, A))
        for j, t in enumerate(range(bounds[s], bounds[s + 1])):
            row = slice(t, t + 1)
            out[row] = selective_state_update(
                state, x[row], dt[row], A, B[row], C[row], D, None if z is None else z[row], dt_bias, zero,
                dt_softplus=dt_softplus, dt_limit=dt_limit,
            )  # fmt: skip
            target = int(targets[s, j])
            if target >= 0 and target != pad_slot:
                store(ssm_state, state_scale, targets[s, j : j + 1], state, rounding)
    return out
