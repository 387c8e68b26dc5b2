"""Replay on GPUs, in two kernels.

The first, a program for each group of heads of a sequence, decides from the ring's cursor whether the ring is folded,
finds what each input counts in each head (``weight * (C . B)``), and appends dt and B. The second, a program for each
head, reads the checkpoint once, adds the inputs, and writes the checkpoint only to fold. It is launched before the
first is done, and waits for it with the checkpoint on its way.

Nothing of this is decided on the host, so that a recorded graph stays right. Every group has a cursor of its own,
moved on by the one program that reads it; and new inputs go behind those that are read.
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
from recurra.ops.triton_dependent import await_before, launch_options, release
from recurra.ops.triton_math import decay_of, silu, step_size
from recurra.ring import Ring
from recurra.rounding import NEAREST, Rounding

_NO_LIMIT = (0.0, float("inf"))
_TILE = 8192  # state elements that a program reads at once
_FOLD_TILE = 2048  # and those that it folds at once
_WARPS = 4
_WEIGH_WARPS = 4
_INT8 = tl.constexpr(3)  # rounding's first scaled format


@triton.jit
def _ring_rows(pointer, place, width, inner, ok):
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
def _steps_of(
    e, h, h_ok, first, held, t, begin, ring_dt, dt, dt_row, dt_head, bias, low, high,
    R: tl.constexpr, H: tl.constexpr, SOFTPLUS: tl.constexpr, LIMITED: tl.constexpr,
):  # fmt: skip
    """Step sizes (heads, E) of the entries e: first those in the ring, then the new tokens up to t; zero for none."""
    old = h_ok[:, None] & (e < held)[None, :]
    new = h_ok[:, None] & ((e >= held) & (e <= held + t))[None, :]
    kept = tl.load(ring_dt + ((first + e) % R * H)[None, :] + h[:, None], mask=old, other=0.0)
    raw = tl.load(dt + (begin + e - held)[None, :] * dt_row + (h * dt_head)[:, None], mask=new, other=0.0)
    fresh = step_size(raw.to(tl.float32), bias[:, None], low, high, SOFTPLUS, LIMITED)
    return tl.where(old, kept, tl.where(new, fresh, 0.0))


@triton.jit(do_not_specialize_on_alignment=["slots", "cu_seqlens", "rejected"])
def _weigh_kernel(
    ring_dt,
    ring_B,
    ring_at,
    dt,
    A,
    B,
    C,
    dt_bias,
    slots,
    cu_seqlens,
    rejected,
    plan,
    factor,
    decay,
    low,
    high,
    ring_dt_slot,
    ring_b_slot,
    ring_at_slot,
    dt_row,
    dt_head,
    b_row,
    b_group,
    c_row,
    c_group,
    H: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    L: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    SEVERAL: tl.constexpr,
    REJECTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BH: tl.constexpr,
    BN: tl.constexpr,
    E: tl.constexpr,
):
    release(DEPENDENT)
    pid = tl.program_id(0)
    group = pid % G
    row = (pid // G).to(tl.int64)
    n = tl.arange(0, BN)
    e = tl.arange(0, E)
    inner = tl.arange(0, BH)
    n_ok, h_ok = n < N, inner < H // G
    h = group * (H // G) + inner
    slot = tl.load(slots + row).to(tl.int64)
    if slot == 0:
        return
    begin = row
    count = 1
    if SEVERAL:
        begin = tl.load(cu_seqlens + row).to(tl.int64)
        count = (tl.load(cu_seqlens + row + 1).to(tl.int64) - begin).to(tl.int32)
    cursor = ring_at + slot * ring_at_slot + 2 * group
    start = tl.load(cursor)
    held = tl.load(cursor + 1)
    if REJECTS:
        held -= tl.load(rejected + row)
    folds = held + count > L
    todo = plan + (row * G + group) * 4
    tl.store(todo, start)
    tl.store(todo + 1, tl.where(folds, held, 0))
    start = tl.where(folds, (start + held) % R, start)
    held = tl.where(folds, 0, held)
    tl.store(todo + 2, start)
    tl.store(todo + 3, held)
    ring_dt += slot * ring_dt_slot
    ring_B += slot * ring_b_slot
    a = tl.load(A + h, mask=h_ok, other=0.0)
    bias = tl.zeros((BH,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(dt_bias + h, mask=h_ok, other=0.0).to(tl.float32)
    place = (start + e) % R
    for t in range(count):
        token = begin + t
        now = _steps_of(
            e, h, h_ok, start, held, t, begin, ring_dt, dt, dt_row, dt_head, bias, low, high, R, H, SOFTPLUS, LIMITED
        )  # fmt: skip
        after = _steps_of(
            e + 1, h, h_ok, start, held, t, begin, ring_dt, dt, dt_row, dt_head, bias, low, high, R, H, SOFTPLUS, LIMITED
        )  # fmt: skip
        weight = decay_of(tl.cumsum(after, 1, reverse=True) * a[:, None]) * now
        old, new = e < held, (e >= held) & (e <= held + t)
        cv = tl.load(C + token * c_row + group * c_group + n, mask=n_ok, other=0.0).to(tl.float32)
        bs = _ring_rows(ring_B, place, G * N, group * N + n, old[:, None] & n_ok[None, :])
        bs += _ring_rows(B, begin + e - held, b_row, group * b_group + n, new[:, None] & n_ok[None, :])
        score = tl.sum(bs * cv[None, :], axis=1)
        at = token * H + h
        tl.store(factor + at[:, None] * E + e[None, :], weight * score[None, :], mask=h_ok[:, None])
        tl.store(decay + at, decay_of(tl.sum(now, axis=1) * a), mask=h_ok)
    for t in range(count):
        into = (start + held + t) % R
        raw = tl.load(dt + (begin + t) * dt_row + h * dt_head, mask=h_ok, other=0.0).to(tl.float32)
        tl.store(ring_dt + into * H + h, step_size(raw, bias, low, high, SOFTPLUS, LIMITED), mask=h_ok)
        given = tl.load(B + (begin + t) * b_row + group * b_group + n, mask=n_ok, other=0.0)
        tl.store(ring_B + (into * G + group) * N + n, given.to(ring_B.dtype.element_ty), mask=n_ok)
    # The program's other threads must have read the cursor before it moves.
    tl.debug_barrier()
    tl.store(cursor, start)
    tl.store(cursor + 1, held + count)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots", "cu_seqlens"])
def _replay_kernel(
    state,
    scale,
    ring_x,
    ring_dt,
    ring_B,
    x,
    A,
    C,
    D,
    z,
    slots,
    cu_seqlens,
    plan,
    factor,
    decay,
    out,
    seed,
    step,
    layer,
    state_slot,
    scale_slot,
    ring_x_slot,
    ring_dt_slot,
    ring_b_slot,
    x_row,
    x_head,
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
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    SEVERAL: tl.constexpr,
    FORMAT: tl.constexpr,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    BP: tl.constexpr,
    BF: tl.constexpr,
    BN: tl.constexpr,
    E: tl.constexpr,
):
    blocks: tl.constexpr = (P + BP - 1) // BP
    parts: tl.constexpr = (BP + BF * LANES - 1) // (BF * LANES)
    pid = tl.program_id(0)
    b = pid % blocks
    h = (pid // blocks) % H
    row = (pid // (blocks * H)).to(tl.int64)
    group = h // (H // G)
    n = tl.arange(0, BN)
    e = tl.arange(0, E)
    p = b * BP + tl.arange(0, BP)
    n_ok, p_ok = n < N, p < P
    ok = p_ok[:, None] & n_ok[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    begin = row
    count = 1
    if SEVERAL:
        begin = tl.load(cu_seqlens + row).to(tl.int64)
        count = (tl.load(cu_seqlens + row + 1).to(tl.int64) - begin).to(tl.int32)
    if slot == 0:
        for t in range(count):
            tl.store(out + ((begin + t) * H + h) * P + p, tl.zeros((BP,), out.dtype.element_ty), mask=p_ok)
        return
    # The checkpoint is asked for before anything is known of the ring: most steps don't change it.
    at = state + slot * state_slot + h * (P * N) + p[:, None] * N + n[None, :]
    scales = scale + slot * scale_slot + h * P + p
    stored = tl.load(at, mask=ok, other=0)
    unit = tl.full((BP,), 1.0, tl.float32)
    if FORMAT >= _INT8:
        unit = tl.load(scales, mask=p_ok, other=0.0).to(tl.float32)
    await_before(DEPENDENT)
    todo = plan + (row * G + group) * 4
    folded = tl.load(todo + 1)
    start = tl.load(todo + 2)
    held = tl.load(todo + 3)
    ring_x += slot * ring_x_slot
    if folded > 0:
        # Every thread must have read the checkpoint before another writes it.
        tl.debug_barrier()
        for part in range(parts):
            _fold_rows(
                state, scale, slot, state_slot, scale_slot, ring_x, ring_dt + slot * ring_dt_slot,
                ring_B + slot * ring_b_slot, tl.load(todo), folded, tl.load(A + h), seed, step, layer, h,
                b * parts + part, R, H, P, G, N, group, FORMAT, LANES, ROUNDS, BF, BN,
            )  # fmt: skip
        tl.debug_barrier()
        stored = tl.load(at, mask=ok, other=0)
        if FORMAT >= _INT8:
            unit = tl.load(scales, mask=p_ok, other=0.0).to(tl.float32)
    for t in range(count):
        token = begin + t
        line = token * H + h
        share = tl.load(factor + line * E + e)
        old, new = e < held, (e >= held) & (e <= held + t)
        xs = _ring_rows(ring_x, (start + e) % R, H * P, h * P + p, old[:, None] & p_ok[None, :])
        if SEVERAL:
            xs += _ring_rows(x, begin + e - held, x_row, h * x_head + p, new[:, None] & p_ok[None, :])
        y = tl.sum(xs * tl.where(old | new, share, 0.0)[:, None], axis=0)
        cv = tl.load(C + token * c_row + group * c_group + n, mask=n_ok, other=0.0).to(tl.float32)
        before = tl.sum(decode(stored, tl.full((BP,), 1.0, tl.float32), FORMAT) * cv[None, :], axis=1)
        y += before * unit * tl.load(decay + line)
        xv = tl.load(x + token * x_row + h * x_head + p, mask=p_ok, other=0.0)
        now = xv.to(tl.float32)
        if not SEVERAL:
            y += now * tl.load(factor + line * E + held)
        if HAS_D:
            y += tl.load(D + h * d_head + p * d_dim, mask=p_ok, other=0.0).to(tl.float32) * now
        if HAS_Z:
            y *= silu(tl.load(z + token * z_row + h * z_head + p, mask=p_ok, other=0.0).to(tl.float32))
        tl.store(out + line * P + p, y.to(out.dtype.element_ty), mask=p_ok)
        into = ring_x + ((start + held + t) % R * H + h) * P + p
        tl.store(into, xv.to(ring_x.dtype.element_ty), mask=p_ok)


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
    cursor = ring_at + slot * ring_at_slot
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


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _empty_kernel(ring_at, slots, ring_at_slot, CELLS: tl.constexpr, BC: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    cell = tl.arange(0, BC)
    tl.store(
        ring_at + slot * ring_at_slot + cell, tl.zeros((BC,), tl.int32), mask=(cell < CELLS) & (slot != 0)
    )


def _power(value: int) -> int:
    return int(triton.next_power_of_2(value))


def _blocks(state: Tensor, rounding: Rounding) -> tuple[int, dict[str, int]]:
    """Rows of the tile that a program reads, and what a fold takes: rows that it holds at once, among others."""
    lanes = GROUP if rounding.stochastic and state.dtype.itemsize < 4 else 1
    columns = _power(state.shape[3])
    rows = min(_power(state.shape[2]), max(lanes, _TILE // columns))
    block = max(1, min(rows // lanes, _FOLD_TILE // columns))
    return rows, {"LANES": lanes, "ROUNDS": rounding.rounds, "BF": block, "BN": columns}


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
            R=ring.x.shape[1], FORMAT=state_format(ssm_state), **_blocks(ssm_state, rounding)[1],
            num_warps=_WARPS,
        )  # fmt: skip
        _empty_kernel[(slots.shape[0],)](
            ring.at, slots, ring.at.stride(0), CELLS=2 * ring.at.shape[1], BC=_power(2 * ring.at.shape[1])
        )


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
    rows, fold = _blocks(ssm_state, rounding)
    entries, places, several = max(2, _power(length)), ring.x.shape[1], cu_seqlens is not None
    bounds = slots if cu_seqlens is None else cu_seqlens
    plan = torch.empty(slots.shape[0], groups, 4, dtype=torch.int32, device=x.device)
    factor = torch.empty(x.shape[0], heads, entries, dtype=torch.float32, device=x.device)
    decay = torch.empty(x.shape[0], heads, dtype=torch.float32, device=x.device)
    options = launch_options(x.device)
    x_slot, dt_slot, b_slot, at_slot = (t.stride(0) for t in ring)
    with torch.cuda.device_of(x):
        _weigh_kernel[(slots.shape[0] * groups,)](
            ring.dt, ring.B, ring.at, dt, A, B, C, A if dt_bias is None else dt_bias, slots, bounds,
            slots if rejected is None else rejected, plan, factor, decay, *dt_limit, dt_slot, b_slot, at_slot,
            dt.stride(0), dt.stride(1), B.stride(0), B.stride(1), C.stride(0), C.stride(1),
            H=heads, G=groups, N=state_size, R=places, L=length, HAS_BIAS=dt_bias is not None,
            SOFTPLUS=dt_softplus, LIMITED=dt_limit != _NO_LIMIT, SEVERAL=several, REJECTS=rejected is not None,
            DEPENDENT=options["DEPENDENT"], BH=_power(heads // groups), BN=fold["BN"], E=entries,
            num_warps=_WEIGH_WARPS,
        )  # fmt: skip
        _replay_kernel[(slots.shape[0] * heads * triton.cdiv(dim, rows),)](
            narrow, scale, ring.x, ring.dt, ring.B, x, A, C, skip, gate, slots, bounds, plan, factor, decay, out,
            *draw_arguments(rounding, ssm_state), ssm_state.stride(0), scale_slot, x_slot, dt_slot, b_slot,
            x.stride(0), x.stride(1), C.stride(0), C.stride(1), skip.stride(0),
            skip.stride(1) if skip.dim() == 2 else 0, gate.stride(0), gate.stride(1),
            H=heads, P=dim, G=groups, N=state_size, R=places, HAS_D=D is not None, HAS_Z=z is not None,
            SEVERAL=several, FORMAT=state_format(ssm_state), **fold, BP=rows, E=entries, num_warps=_WARPS, **options,
        )  # fmt: skip
    return out
