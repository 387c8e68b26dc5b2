"""Replay on GPUs: a program is a head of a sequence. It reads the checkpoint once and writes it only to fold.

Whether a ring is folded is each program's own decision, from its cursor in device memory: the host knows nothing of it
and a recorded graph stays right. Every head has a cursor so that no program reads one that another has
moved on; and since new inputs go behind those that are read, the ring of B needs no order among programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.replay import check_ring
from recurra.ops.rounding import GROUP
from recurra.ops.rounding.triton_device import (
    decode,
    draw_arguments,
    draw_origin,
    draw_words,
    half_word,
    load_state,
    state_format,
    state_pointers,
    store_state,
)
from recurra.ops.triton_math import decay_of, silu, step_size
from recurra.ring import Ring
from recurra.rounding import NEAREST, Rounding

_NO_LIMIT = (0.0, float("inf"))
_TILE = 8192  # state elements that a program reads at once
_FOLD_TILE = 2048  # and those that it folds at once
_WARPS = 4
_INT8 = tl.constexpr(3)  # rounding's first scaled format


@triton.jit
def _ring_vector(pointer, place, width, inner, ok):
    """Rows of the ring: place (E,), inner (M,) offsets in a row of ``width``; ok (E, M)."""
    return tl.load(pointer + place[:, None] * width + inner[None, :], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def _fold_tile(tile, ring_x, ring_dt, ring_B, start, held, a, h, p, n, R, H, P, G, N, group):
    """A tile (rows p, N) after the ``held`` oldest inputs; from the newest back, so that decays only multiply."""
    later = 0.0
    fresh = tl.zeros_like(tile)
    for back in range(held):
        place = (start + held - 1 - back) % R
        dt = tl.load(ring_dt + place * H + h)
        xv = tl.load(ring_x + (place * H + h) * P + p, mask=p < P, other=0.0).to(tl.float32)
        bv = tl.load(ring_B + (place * G + group) * N + n, mask=n < N, other=0.0).to(tl.float32)
        fresh += (decay_of(later * a) * dt * xv)[:, None] * bv[None, :]
        later += dt
    return decay_of(later * a) * tile + fresh


@triton.jit
def _fold_rows(
    state, scale, slot, state_slot, scale_slot, ring_x, ring_dt, ring_B, start, held, a, seed, step, layer, h, b,
    R: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr, group,
    FORMAT: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr, BF: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Fold block b of a head's rows and store it."""
    i = b * BF + tl.arange(0, BF)
    n = tl.arange(0, BN)
    n_ok = n < N
    at = state + slot * state_slot + h * (P * N) + (i * LANES)[:, None] * N + n[None, :]
    scales = scale + slot * scale_slot + h * P + i * LANES
    words = (i, i, i, i)
    if LANES > 1:
        first = h * ((P + LANES - 1) // LANES)
        words = draw_words(
            (first + i)[:, None] * N + n[None, :], draw_origin(seed, step, slot, layer), ROUNDS
        )
    for j in tl.static_range(LANES):
        p = i * LANES + j
        p_ok = p < P
        ok = p_ok[:, None] & n_ok[None, :]
        tile = load_state(at + j * N, ok, scales + j, p_ok, FORMAT)
        tile = _fold_tile(tile, ring_x, ring_dt, ring_B, start, held, a, h, p, n, R, H, P, G, N, group)
        noise = half_word(words, j) if LANES > 1 else 0
        store_state(at + j * N, ok, scales + j, p_ok, tile, noise, FORMAT, LANES > 1)


@triton.jit
def _step_of(e, first, held, t, begin, ring_dt, dt, dt_row, bias, low, high,
             R: tl.constexpr, H: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr):  # fmt: skip
    """Step sizes of the entries e: first those in the ring, then the new tokens up to t; zero for none."""
    old, new = e < held, (e >= held) & (e <= held + t)
    kept = tl.load(ring_dt + (first + e) % R * H, mask=old, other=0.0)
    raw = tl.load(dt + (begin + e - held) * dt_row, mask=new, other=0.0).to(tl.float32)
    return tl.where(old, kept, tl.where(new, step_size(raw, bias, low, high, SOFTPLUS, LIMITED), 0.0))


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots", "cu_seqlens", "rejected"])
def _replay_kernel(
    state,
    scale,
    ring_x,
    ring_dt,
    ring_B,
    ring_at,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    slots,
    cu_seqlens,
    rejected,
    out,
    seed,
    step,
    layer,
    low,
    high,
    state_slot,
    scale_slot,
    ring_x_slot,
    ring_dt_slot,
    ring_b_slot,
    ring_at_slot,
    x_row,
    x_head,
    dt_row,
    dt_head,
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
    G: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    SEVERAL: tl.constexpr,
    REJECTS: tl.constexpr,
    FORMAT: tl.constexpr,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    BN: tl.constexpr,
    E: tl.constexpr,
):
    pid = tl.program_id(0)
    h = pid % H
    row = (pid // H).to(tl.int64)
    group = h // (H // G)
    n = tl.arange(0, BN)
    e = tl.arange(0, E)
    n_ok = n < N
    slot = tl.load(slots + row).to(tl.int64)
    begin = row
    count = 1
    if SEVERAL:
        begin = tl.load(cu_seqlens + row).to(tl.int64)
        count = (tl.load(cu_seqlens + row + 1).to(tl.int64) - begin).to(tl.int32)
    if slot == 0:
        for t in range(count):
            for b in range((P + BP - 1) // BP):
                p = b * BP + tl.arange(0, BP)
                tl.store(
                    out + ((begin + t) * H + h) * P + p, tl.zeros((BP,), out.dtype.element_ty), mask=p < P
                )
        return
    cursor = ring_at + slot * ring_at_slot + 2 * h
    start = tl.load(cursor)
    held = tl.load(cursor + 1)
    if REJECTS:
        held -= tl.load(rejected + row)
    ring_x += slot * ring_x_slot
    ring_dt += slot * ring_dt_slot
    ring_B += slot * ring_b_slot
    a = tl.load(A + h)
    bias = tl.load(dt_bias + h).to(tl.float32) if HAS_BIAS else 0.0
    dt += h * dt_head
    folds = held + count > L
    if folds:
        for b in range((P + BF * LANES - 1) // (BF * LANES)):
            _fold_rows(
                state, scale, slot, state_slot, scale_slot, ring_x, ring_dt, ring_B, start, held, a, seed, step,
                layer, h, b, R, H, P, G, N, group, FORMAT, LANES, ROUNDS, BF, BN,
            )  # fmt: skip
        # What follows reads the state in another layout than it was written in.
        tl.debug_barrier()
    start = tl.where(folds, (start + held) % R, start)
    held = tl.where(folds, 0, held)
    for b in tl.static_range((P + BP - 1) // BP):
        p = b * BP + tl.arange(0, BP)
        p_ok = p < P
        ok = p_ok[:, None] & n_ok[None, :]
        stored = tl.load(
            state + slot * state_slot + h * (P * N) + p[:, None] * N + n[None, :], mask=ok, other=0
        )
        unit = tl.full((BP,), 1.0, tl.float32)
        if FORMAT >= _INT8:
            unit = tl.load(scale + slot * scale_slot + h * P + p, mask=p_ok, other=0.0).to(tl.float32)
        for t in range(count):
            token = begin + t
            now = _step_of(
                e, start, held, t, begin, ring_dt + h, dt, dt_row, bias, low, high, R, H, SOFTPLUS, LIMITED
            )
            after = _step_of(
                e + 1, start, held, t, begin, ring_dt + h, dt, dt_row, bias, low, high, R, H, SOFTPLUS, LIMITED
            )  # fmt: skip
            weight = decay_of(tl.cumsum(after, 0, reverse=True) * a) * now
            place = (start + e) % R
            old, new = e < held, (e >= held) & (e <= held + t)
            fresh = begin + e - held
            cv = tl.load(C + token * c_row + group * c_group + n, mask=n_ok, other=0.0).to(tl.float32)
            bs = _ring_vector(ring_B, place, G * N, group * N + n, old[:, None] & n_ok[None, :])
            bs += _ring_vector(B, fresh, b_row, group * b_group + n, new[:, None] & n_ok[None, :])
            score = tl.sum(bs * cv[None, :], axis=1) * weight
            xs = _ring_vector(ring_x, place, H * P, h * P + p, old[:, None] & p_ok[None, :])
            xs += _ring_vector(x, fresh, x_row, h * x_head + p, new[:, None] & p_ok[None, :])
            y = tl.sum(xs * score[:, None], axis=0)
            before = tl.sum(decode(stored, tl.full((BP,), 1.0, tl.float32), FORMAT) * cv[None, :], axis=1)
            y += before * unit * decay_of(tl.sum(now) * a)
            if HAS_D:
                skip = tl.load(D + h * d_head + p * d_dim, mask=p_ok, other=0.0).to(tl.float32)
                y += skip * tl.load(x + token * x_row + h * x_head + p, mask=p_ok, other=0.0).to(tl.float32)
            if HAS_Z:
                gate = tl.load(z + token * z_row + h * z_head + p, mask=p_ok, other=0.0).to(tl.float32)
                y *= silu(gate)
            tl.store(out + (token * H + h) * P + p, y.to(out.dtype.element_ty), mask=p_ok)
        for t in range(count):
            into = ring_x + ((start + held + t) % R * H + h) * P + p
            given = tl.load(x + (begin + t) * x_row + h * x_head + p, mask=p_ok, other=0.0)
            tl.store(into, given.to(ring_x.dtype.element_ty), mask=p_ok)
    for t in range(count):
        place = (start + held + t) % R
        raw = tl.load(dt + (begin + t) * dt_row).to(tl.float32)
        tl.store(ring_dt + place * H + h, step_size(raw, bias, low, high, SOFTPLUS, LIMITED))
        if h % (H // G) == 0:
            given = tl.load(B + (begin + t) * b_row + group * b_group + n, mask=n_ok, other=0.0)
            tl.store(ring_B + (place * G + group) * N + n, given.to(ring_B.dtype.element_ty), mask=n_ok)
    # The program's other threads must have read the cursor before it moves.
    tl.debug_barrier()
    tl.store(cursor, start)
    tl.store(cursor + 1, held + count)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots", "has_state"])
def _fold_kernel(
    state,
    scale,
    ring_x,
    ring_dt,
    ring_B,
    ring_at,
    A,
    slots,
    has_state,
    seed,
    step,
    layer,
    state_slot,
    scale_slot,
    ring_x_slot,
    ring_dt_slot,
    ring_b_slot,
    ring_at_slot,
    H: tl.constexpr,
    P: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    FORMAT: tl.constexpr,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    BF: tl.constexpr,
    BN: tl.constexpr,
):
    pid = tl.program_id(0)
    h = pid % H
    row = (pid // H).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot == 0:
        return
    cursor = ring_at + slot * ring_at_slot + 2 * h
    kept = tl.load(has_state + row).to(tl.int1)
    start = tl.load(cursor, mask=kept, other=0)
    held = tl.load(cursor + 1, mask=kept, other=0)
    if held > 0:
        for b in range((P + BF * LANES - 1) // (BF * LANES)):
            _fold_rows(
                state, scale, slot, state_slot, scale_slot, ring_x + slot * ring_x_slot, ring_dt + slot * ring_dt_slot,
                ring_B + slot * ring_b_slot, start, held, tl.load(A + h), seed, step, layer, h, b,
                R, H, P, G, N, h // (H // G), FORMAT, LANES, ROUNDS, BF, BN,
            )  # fmt: skip
    tl.debug_barrier()
    tl.store(cursor, 0)
    tl.store(cursor + 1, 0)


def _power(value: int) -> int:
    return int(triton.next_power_of_2(value))


def _fold_blocks(state: Tensor, rounding: Rounding) -> dict[str, int]:
    lanes = GROUP if rounding.stochastic and state.dtype.itemsize < 4 else 1
    dim, columns = state.shape[2], _power(state.shape[3])
    block = min(_power(triton.cdiv(dim, lanes)), max(1, _FOLD_TILE // columns))
    return {"LANES": lanes, "ROUNDS": rounding.rounds, "BF": block, "BN": columns}


def _ring_arguments(ring: Ring) -> tuple[int, ...]:
    return tuple(t.stride(0) for t in ring)


def _check(ssm_state: Tensor, ring: Ring) -> None:
    _, _, dim, state_size = ssm_state.shape
    assert ssm_state.stride()[1:] == (dim * state_size, state_size, 1), ssm_state.stride()
    assert ring.dt.dtype == torch.float32, ring.dt.dtype


def replay_fold(
    ssm_state: Tensor,
    ring: Ring,
    A: Tensor,
    slots: Tensor,
    has_state: Tensor,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> None:
    """See :class:`recurra.ops.replay.ReplayFold`."""
    check_ring(ring, ssm_state, 1)
    _check(ssm_state, ring)
    if slots.shape[0] == 0:
        return
    _, heads, dim, state_size = ssm_state.shape
    narrow, scale, scale_slot = state_pointers(ssm_state, state_scale)
    with torch.cuda.device_of(ssm_state):
        _fold_kernel[(slots.shape[0] * heads,)](
            narrow, scale, *ring, A, slots, has_state, *draw_arguments(rounding, ssm_state), ssm_state.stride(0),
            scale_slot, *_ring_arguments(ring), H=heads, P=dim, G=ring.B.shape[2], N=state_size,
            R=ring.x.shape[1], FORMAT=state_format(ssm_state), **_fold_blocks(ssm_state, rounding),
            num_warps=_WARPS,
        )  # fmt: skip


def replay_state_update(
    ssm_state: Tensor,
    ring: Ring,
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
    cu_seqlens: Tensor | None = None,
    rejected: Tensor | None = None,
    window: int = 1,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.replay.ReplayStateUpdate`."""
    length = check_ring(ring, ssm_state, window)
    _check(ssm_state, ring)
    for name, tensor in (("x", x), ("B", B), ("C", C), ("z", x if z is None else z)):
        assert tensor.stride(-1) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if slots.shape[0] == 0:
        return out
    _, heads, dim = x.shape
    state_size, groups = ssm_state.shape[3], B.shape[1]
    assert groups == ring.B.shape[2], (B.shape, ring.B.shape)
    narrow, scale, scale_slot = state_pointers(ssm_state, state_scale)
    gate, skip = x if z is None else z, A if D is None else D
    blocks = _fold_blocks(ssm_state, rounding)
    with torch.cuda.device_of(x):
        _replay_kernel[(slots.shape[0] * heads,)](
            narrow, scale, *ring, x, dt, A, B, C, skip, gate, A if dt_bias is None else dt_bias, slots,
            slots if cu_seqlens is None else cu_seqlens, slots if rejected is None else rejected, out,
            *draw_arguments(rounding, ssm_state), *dt_limit, ssm_state.stride(0), scale_slot,
            *_ring_arguments(ring), x.stride(0), x.stride(1), dt.stride(0), dt.stride(1), B.stride(0), B.stride(1),
            C.stride(0), C.stride(1), skip.stride(0), skip.stride(1) if skip.dim() == 2 else 0,
            gate.stride(0), gate.stride(1),
            H=heads, P=dim, G=groups, N=state_size, R=ring.x.shape[1], L=length, HAS_D=D is not None,
            HAS_Z=z is not None, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
            LIMITED=dt_limit != _NO_LIMIT, SEVERAL=cu_seqlens is not None, REJECTS=rejected is not None,
            FORMAT=state_format(ssm_state), **blocks,
            BP=min(_power(dim), max(1, _TILE // blocks["BN"])), E=max(2, _power(length)), num_warps=_WARPS,
        )  # fmt: skip
    return out
