"""A step with several tokens on GPUs: a program walks the tokens of one sequence for a tile of its state or window.

Rounding by chance to states of 16 or 8 bits, and 8-bit states at all, go through float32 copies
(:mod:`recurra.ops.rounding.triton`): a tile here needn't hold whole rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rounding import NEAREST, SCALED, Rounding
from recurra.ops.rounding.triton import store_states, widen_states
from recurra.ops.several.first_slot import store_everywhere
from recurra.ops.triton_math import decay_of, silu, step_size
from recurra.types import SCRATCH_SLOT

_NO_LIMIT = (0.0, float("inf"))
_CHANNELS = 128
_TILE = 2048  # state elements of a program


@triton.jit(
    do_not_specialize=["pad_slot"],
    do_not_specialize_on_alignment=["cu_seqlens", "sources", "targets", "accepted"],
)
def _conv_kernel(
    x,
    weight,
    bias,
    state,
    out,
    cu_seqlens,
    sources,
    targets,
    accepted,
    pad_slot,
    x_row,
    weight_row,
    state_slot,
    state_channel,
    state_place,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ACCEPTED: tl.constexpr,
    BC: tl.constexpr,
):
    blocks: tl.constexpr = (CHANNELS + BC - 1) // BC
    pid = tl.program_id(0)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    seq = pid // blocks
    c_ok = c < CHANNELS
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    source = tl.load(sources + seq).to(tl.int64)
    target = tl.load(targets + seq).to(tl.int64)
    idle = (source == pad_slot) | (source < 0)
    first = L - (W - 1)
    if HAS_ACCEPTED:
        first = tl.load(accepted + seq) - 1
    channel = c.to(tl.int64) * state_channel
    old = state + tl.where(idle, 0, source) * state_slot + channel
    for t in range(begin, end):
        acc = tl.zeros((BC,), tl.float32)
        place = (t - begin).to(tl.int32)
        for j in tl.static_range(W):
            back = place + j - (W - 1)  # negative: in the window
            kept = tl.load(
                old + (first + place + j) * state_place, mask=c_ok & (back < 0) & (idle == 0), other=0.0
            )
            new = tl.load(x + (begin + back) * x_row + c, mask=c_ok & (back >= 0), other=0.0)
            tap = tl.load(weight + c * weight_row + j, mask=c_ok, other=0.0).to(tl.float32)
            acc += (kept.to(tl.float32) + new.to(tl.float32)) * tap
        if HAS_BIAS:
            acc += tl.load(bias + c, mask=c_ok, other=0.0).to(tl.float32)
        if SILU:
            acc = silu(acc)
        acc = tl.where(idle, 0.0, acc)
        tl.store(out + t * CHANNELS + c, acc.to(out.dtype.element_ty), mask=c_ok)
    if idle | (target == pad_slot) | (target < 0) | (begin == end):
        return
    length = (end - begin).to(tl.int32)
    i = tl.arange(0, LP)
    held = L - length  # entries that stay, before the step's tokens
    origin = length
    if HAS_ACCEPTED:
        held = W - 2
        origin = first + 1
    from_x = i - held
    stays = (i < held)[None, :] & c_ok[:, None]
    comes = ((from_x >= 0) & (from_x < length) & (i < L))[None, :] & c_ok[:, None]
    kept = tl.load(old[:, None] + (origin + i)[None, :] * state_place, mask=stays, other=0.0).to(tl.float32)
    new = tl.load(x + (begin + from_x)[None, :] * x_row + c[:, None], mask=comes, other=0.0).to(tl.float32)
    # Neighbouring threads may still be reading what is overwritten here.
    tl.debug_barrier()
    at = state + target * state_slot + channel
    tl.store(
        at[:, None] + i[None, :] * state_place, tl.where(comes, new, kept).to(state.dtype.element_ty),
        mask=stays | comes,
    )  # fmt: skip


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
    channels, width = weight.shape
    length = conv_state.shape[2]
    assert 2 <= width <= 5, f"conv width {width}: 2 to 5 are supported"
    assert conv_state.shape[1] == channels, (conv_state.shape, weight.shape)
    assert length >= width - 1, (conv_state.shape, weight.shape)
    assert x.stride(1) == 1, f"strides {x.stride()}: unit channel stride needed"
    assert weight.stride(1) == 1, f"strides {weight.stride()}: unit tap stride needed"
    out = torch.zeros((x.shape[0], channels), dtype=x.dtype, device=x.device)
    if sources.shape[0] == 0:
        return out
    with torch.cuda.device_of(x):
        _conv_kernel[(sources.shape[0] * triton.cdiv(channels, _CHANNELS),)](
            x, weight, weight if bias is None else bias, conv_state, out, cu_seqlens, sources, targets,
            sources if accepted is None else accepted, pad_slot, x.stride(0), weight.stride(0),
            *conv_state.stride(),
            CHANNELS=channels, W=width, L=length, LP=triton.next_power_of_2(length), SILU=silu,
            HAS_BIAS=bias is not None, HAS_ACCEPTED=accepted is not None, BC=_CHANNELS, num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _vector(pointer, t, row, column, ok):
    return tl.load(pointer + t * row + column, mask=ok, other=0.0).to(tl.float32)


@triton.jit(
    do_not_specialize=["pad_slot"], do_not_specialize_on_alignment=["cu_seqlens", "sources", "targets"]
)
def _state_kernel(
    state,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    out,
    cu_seqlens,
    sources,
    targets,
    pad_slot,
    low,
    high,
    state_slot,
    target_row,
    x_row,
    x_head,
    dt_row,
    dt_head,
    a_row,
    b_row,
    b_group,
    c_row,
    c_group,
    d_head,
    d_dim,
    z_row,
    z_head,
    H: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # Mamba-1: P channels of one "head", with a dt and a row of A each
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    blocks: tl.constexpr = (P + BP - 1) // BP
    pid = tl.program_id(0)
    p = (pid % blocks) * BP + tl.arange(0, BP)
    h = (pid // blocks) % H
    seq = (pid // (blocks * H)).to(tl.int64)
    n = tl.arange(0, BN)
    p_ok, n_ok = p < P, n < N
    source = tl.load(sources + seq).to(tl.int64)
    if (source == pad_slot) | (source < 0):
        return
    ok = p_ok[:, None] & n_ok[None, :]
    inner = h * (P * N) + p[:, None] * N + n[None, :]
    carried = tl.load(state + source * state_slot + inner, mask=ok, other=0.0).to(tl.float32)
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
    group = h // HEADS_A_GROUP
    # A vector down the channels in Mamba-1, one number in Mamba-2, as a vector of one.
    one = tl.zeros((1,), tl.int32)
    who = p if BY_CHANNEL else one + h
    who_ok = p_ok if BY_CHANNEL else one == 0
    bias = tl.load(dt_bias + who, mask=who_ok, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
    if BY_CHANNEL:
        rate = tl.load(A + p[:, None] * a_row + n[None, :], mask=ok, other=0.0)
    else:
        rate = tl.load(A + who)[:, None]
    skip = tl.load(D + h * d_head + p * d_dim, mask=p_ok, other=0.0).to(tl.float32) if HAS_D else 0.0
    for t in range(begin, end):
        raw = tl.load(dt + t * dt_row + (p if BY_CHANNEL else who * dt_head), mask=who_ok, other=0.0).to(
            tl.float32
        )
        step = step_size(raw, bias, low, high, SOFTPLUS, LIMITED)
        xv = _vector(x, t, x_row, h * x_head + p, p_ok)
        bv = _vector(B, t, b_row, group * b_group + n, n_ok)
        cv = _vector(C, t, c_row, group * c_group + n, n_ok)
        carried = decay_of(step[:, None] * rate) * carried + (step * xv)[:, None] * bv[None, :]
        target = tl.load(targets + seq * target_row + (t - begin)).to(tl.int64)
        wanted = (target != pad_slot) & (target >= 0)
        kept_at = state + tl.where(wanted, target, 0) * state_slot + inner
        tl.store(kept_at, carried.to(state.dtype.element_ty), mask=ok & wanted)
        y = tl.sum(carried * cv[None, :], axis=1)
        if HAS_D:
            y += skip * xv
        if HAS_Z:
            y *= silu(_vector(z, t, z_row, h * z_head + p, p_ok))
        tl.store(out + (t * H + h) * P + p, y.to(out.dtype.element_ty), mask=p_ok)


def _run(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    out: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    pad_slot: int,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> None:
    by_channel = state.dim() == 3
    heads, dim, state_size = (1, *state.shape[1:]) if by_channel else state.shape[1:]
    if by_channel:
        x, B, C, out = x[:, None], B[:, None], C[:, None], out[:, None]
        z, D = None if z is None else z[:, None], None if D is None else D[None]
    assert state.stride()[1:] == ((state_size, 1) if by_channel else (dim * state_size, state_size, 1)), (
        f"strides {state.stride()}: each slot's state must be contiguous"
    )
    assert heads % B.shape[1] == 0, (x.shape, B.shape)
    columns = triton.next_power_of_2(state_size)
    block = min(triton.next_power_of_2(dim), max(1, _TILE // columns))
    gate, skip = x if z is None else z, A if D is None else D
    cu_seqlens, sources, targets = where
    with torch.cuda.device_of(x):
        _state_kernel[(sources.shape[0] * heads * triton.cdiv(dim, block),)](
            state, x, dt, A, B, C, skip, gate, A if dt_bias is None else dt_bias, out, cu_seqlens, sources,
            targets, pad_slot, *dt_limit, state.stride(0), targets.stride(0), x.stride(0), x.stride(1),
            dt.stride(0), dt.stride(1), A.stride(0), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
            skip.stride(0), skip.stride(1) if skip.dim() == 2 else 0, gate.stride(0), gate.stride(1),
            H=heads, P=dim, N=state_size, HEADS_A_GROUP=heads // B.shape[1], BY_CHANNEL=by_channel,
            HAS_D=D is not None, HAS_Z=z is not None, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
            LIMITED=dt_limit != _NO_LIMIT, BP=block, BN=columns,
            num_warps=max(1, min(8, block * columns // 1024)),
        )  # fmt: skip


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
    dt_limit: tuple[float, float] = _NO_LIMIT,
    pad_slot: int = SCRATCH_SLOT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.several.SelectiveStateUpdateVarlen`."""
    inputs = {"x": x, "B": B, "C": C, "z": x if z is None else z, "A": A if A.dim() == 2 else A[None]}
    for name, tensor in inputs.items():
        assert tensor.stride(-1) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
    assert targets.stride(1) == 1 or targets.shape[1] <= 1, targets.stride()
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    rows, longest = targets.shape
    if x.shape[0] == 0 or rows == 0:
        return out
    operands = (x, dt, A, B, C, D, z, dt_bias, out)
    by_chance = rounding.stochastic and ssm_state.dtype.itemsize < 4
    if ssm_state.dtype not in SCALED and not by_chance:
        _run(ssm_state, *operands, (cu_seqlens, sources, targets), pad_slot, dt_softplus, dt_limit)
        return out
    # Copies of every state that is read or kept: rows of sources, then a row for each token of a sequence.
    live = (sources >= 0) & (sources != pad_slot)
    kept = (targets >= 0) & (targets != pad_slot)
    kept &= torch.arange(longest, device=x.device)[None] < cu_seqlens.diff()[:, None]
    kept &= live[:, None]
    copies = torch.empty((rows * (1 + longest), *ssm_state.shape[1:]), dtype=torch.float32, device=x.device)
    safe = torch.where(live, sources, 0)
    copies[:rows] = widen_states(ssm_state, state_scale, safe, live)
    places = torch.arange(rows * (1 + longest), dtype=torch.int32, device=x.device)
    read = torch.where(live, places[:rows], -1)
    write = torch.where(kept, places[rows:].view(rows, longest), -1)
    _run(copies, *operands, (cu_seqlens, read, write), -1, dt_softplus, dt_limit)
    bounds = torch.cat([kept.new_zeros(1, dtype=torch.int32), kept.flatten().cumsum(0, dtype=torch.int32)])
    safe_targets = torch.where(kept, targets, 0).flatten().to(torch.int32)
    store_everywhere(
        store_states, ssm_state, state_scale, safe_targets, copies[rows:], bounds, rounding, pad_slot
    )
    return out
