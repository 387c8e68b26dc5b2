"""One step of the recurrence on GPUs.

A program holds a tile of one sequence's state, (P block, N) of a head or (channel block, N), reads it
once, writes it once, and needs no other program. The tile's size depends on N alone, so that a longer
or shorter batch never compiles anything.

Where states are rounded by chance a program holds eight tiles, tile j the rows ``8 i + j``, which share their
draws (see :mod:`recurra.ops.rounding.triton_device`); all are asked for before the first is worked on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rounding import GROUP, NEAREST, Rounding
from recurra.ops.rounding.triton_device import (
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

_NO_LIMIT = (0.0, float("inf"))
#: State elements of a tile, and of a thread's share of it: to nearest, by chance in 16 bits, by chance in 8.
_NEAREST, _CHANCE_16, _CHANCE_8 = (2048, 32), (256, 8), (1024, 16)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])
def _heads_kernel(
    state,
    scale,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    slots,
    out,
    seed,
    step,
    layer,
    low,
    high,
    state_slot,
    scale_slot,
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
    N: tl.constexpr,
    HEADS_A_GROUP: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    FORMAT: tl.constexpr,
    LANES: tl.constexpr,  # tiles of a program: 8 if states are rounded by chance, else 1
    ROUNDS: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    await_before(DEPENDENT)
    blocks: tl.constexpr = (P + BP * LANES - 1) // (BP * LANES)
    pid = tl.program_id(0)
    i = (pid % blocks) * BP + tl.arange(0, BP)
    h = (pid // blocks) % H
    row = (pid // (blocks * H)).to(tl.int64)
    n = tl.arange(0, BN)
    n_ok = n < N
    slot = tl.load(slots + row).to(tl.int64)
    y_at = out + (row * H + h) * P
    if slot == 0:
        for j in tl.static_range(LANES):
            p = i * LANES + j
            tl.store(y_at + p, tl.zeros((BP,), out.dtype.element_ty), mask=p < P)
        return
    tile = state + slot * state_slot + h * (P * N) + (i * LANES)[:, None] * N + n[None, :]
    scales = scale + slot * scale_slot + h * P + i * LANES
    # Everything is asked for before anything is written: no load may pass a store that could be to its place.
    old, xs, zs, skips = (), (), (), ()
    for j in tl.static_range(LANES):
        p = i * LANES + j
        p_ok = p < P
        old += (load_state(tile + j * N, p_ok[:, None] & n_ok[None, :], scales + j, p_ok, FORMAT),)  # type: ignore[assignment]
        xs += (tl.load(x + row * x_row + h * x_head + p, mask=p_ok, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        if HAS_Z:
            zs += (tl.load(z + row * z_row + h * z_head + p, mask=p_ok, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        if HAS_D:
            skips += (tl.load(D + h * d_head + p * d_dim, mask=p_ok, other=0.0).to(tl.float32),)  # type: ignore[assignment]

    group = h // HEADS_A_GROUP
    bias = tl.load(dt_bias + h).to(tl.float32) if HAS_BIAS else 0.0
    raw = tl.load(dt + row * dt_row + h * dt_head).to(tl.float32)
    dt_now = step_size(raw, bias, low, high, SOFTPLUS, LIMITED)
    decay = decay_of(dt_now * tl.load(A + h))
    bv = tl.load(B + row * b_row + group * b_group + n, mask=n_ok, other=0.0).to(tl.float32)
    cv = tl.load(C + row * c_row + group * c_group + n, mask=n_ok, other=0.0).to(tl.float32)
    words = (i, i, i, i)
    if LANES > 1:
        first = h * ((P + LANES - 1) // LANES)
        words = draw_words(
            (first + i)[:, None] * N + n[None, :], draw_origin(seed, step, slot, layer), ROUNDS
        )
    for j in tl.static_range(LANES):
        p = i * LANES + j
        p_ok = p < P
        carried = decay * old[j] + (dt_now * xs[j])[:, None] * bv[None, :]
        noise = half_word(words, j) if LANES > 1 else 0
        ok = p_ok[:, None] & n_ok[None, :]
        store_state(tile + j * N, ok, scales + j, p_ok, carried, noise, FORMAT, LANES > 1)
        y = tl.sum(carried * cv[None, :], axis=1)
        if HAS_D:
            y += skips[j] * xs[j]
        if HAS_Z:
            y *= silu(zs[j])
        tl.store(y_at + p, y.to(out.dtype.element_ty), mask=p_ok)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots"])
def _channels_kernel(
    state,
    scale,
    x,
    dt,
    A,
    B,
    C,
    D,
    z,
    dt_bias,
    slots,
    out,
    seed,
    step,
    layer,
    low,
    high,
    state_slot,
    scale_slot,
    x_row,
    dt_row,
    a_row,
    b_row,
    c_row,
    z_row,
    CHANNELS: tl.constexpr,
    N: tl.constexpr,
    HAS_D: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    LIMITED: tl.constexpr,
    FORMAT: tl.constexpr,
    LANES: tl.constexpr,
    ROUNDS: tl.constexpr,
    BC: tl.constexpr,
    BN: tl.constexpr,
):
    blocks: tl.constexpr = (CHANNELS + BC * LANES - 1) // (BC * LANES)
    pid = tl.program_id(0)
    i = (pid % blocks) * BC + tl.arange(0, BC)
    row = (pid // blocks).to(tl.int64)
    n = tl.arange(0, BN)
    n_ok = n < N
    slot = tl.load(slots + row).to(tl.int64)
    y_at = out + row * CHANNELS
    if slot == 0:
        for j in tl.static_range(LANES):
            c = i * LANES + j
            tl.store(y_at + c, tl.zeros((BC,), out.dtype.element_ty), mask=c < CHANNELS)
        return
    tile = state + slot * state_slot + (i * LANES)[:, None] * N + n[None, :]
    scales = scale + slot * scale_slot + i * LANES
    old, raws, xs, zs = (), (), (), ()
    for j in tl.static_range(LANES):
        c = i * LANES + j
        c_ok = c < CHANNELS
        old += (load_state(tile + j * N, c_ok[:, None] & n_ok[None, :], scales + j, c_ok, FORMAT),)  # type: ignore[assignment]
        raws += (tl.load(dt + row * dt_row + c, mask=c_ok, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        xs += (tl.load(x + row * x_row + c, mask=c_ok, other=0.0).to(tl.float32),)  # type: ignore[assignment]
        if HAS_Z:
            zs += (tl.load(z + row * z_row + c, mask=c_ok, other=0.0).to(tl.float32),)  # type: ignore[assignment]

    bv = tl.load(B + row * b_row + n, mask=n_ok, other=0.0).to(tl.float32)
    cv = tl.load(C + row * c_row + n, mask=n_ok, other=0.0).to(tl.float32)
    words = (i, i, i, i)
    if LANES > 1:
        words = draw_words(i[:, None] * N + n[None, :], draw_origin(seed, step, slot, layer), ROUNDS)
    for j in tl.static_range(LANES):
        c = i * LANES + j
        c_ok = c < CHANNELS
        ok = c_ok[:, None] & n_ok[None, :]
        bias = tl.load(dt_bias + c, mask=c_ok, other=0.0).to(tl.float32) if HAS_BIAS else 0.0
        dt_now = step_size(raws[j], bias, low, high, SOFTPLUS, LIMITED)
        rate = tl.load(A + c[:, None] * a_row + n[None, :], mask=ok, other=0.0)
        carried = decay_of(dt_now[:, None] * rate) * old[j] + (dt_now * xs[j])[:, None] * bv[None, :]
        noise = half_word(words, j) if LANES > 1 else 0
        store_state(tile + j * N, ok, scales + j, c_ok, carried, noise, FORMAT, LANES > 1)
        y = tl.sum(carried * cv[None, :], axis=1)
        if HAS_D:
            y += tl.load(D + c, mask=c_ok, other=0.0).to(tl.float32) * xs[j]
        if HAS_Z:
            y *= silu(zs[j])
        tl.store(y_at + c, y.to(out.dtype.element_ty), mask=c_ok)


def _blocks(rows: int, state_size: int, lanes: int, itemsize: int) -> tuple[int, int, int]:
    """Rows and columns of a program's tile, and its warps."""
    tile, share = _NEAREST if lanes == 1 else _CHANCE_16 if itemsize > 1 else _CHANCE_8
    columns = triton.next_power_of_2(state_size)
    block = min(triton.next_power_of_2(triton.cdiv(rows, lanes)), max(1, tile // columns))
    return block, columns, max(1, min(8, block * columns // (32 * share)))


def _lanes(state: Tensor, rounding: Rounding) -> int:
    return GROUP if rounding.stochastic and state.dtype.itemsize < 4 else 1


def _heads(
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
    out: Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    state_scale: Tensor | None,
    rounding: Rounding,
) -> None:
    rows, heads, dim = x.shape
    state_size = ssm_state.shape[3]
    assert ssm_state.stride()[1:] == (dim * state_size, state_size, 1), ssm_state.stride()
    assert B.shape[1] == C.shape[1], (B.shape, C.shape)
    assert heads % B.shape[1] == 0, (x.shape, B.shape)
    narrow, scale, scale_slot = state_pointers(ssm_state, state_scale)
    lanes = _lanes(ssm_state, rounding)
    block, columns, warps = _blocks(dim, state_size, lanes, ssm_state.itemsize)
    gate, skip = x if z is None else z, A if D is None else D
    _heads_kernel[(rows * heads * triton.cdiv(dim, block * lanes),)](
        narrow, scale, x, dt, A, B, C, skip, gate, A if dt_bias is None else dt_bias, slots, out,
        *draw_arguments(rounding, ssm_state), *dt_limit, ssm_state.stride(0), scale_slot, x.stride(0), x.stride(1), dt.stride(0), dt.stride(1), B.stride(0), B.stride(1),
        C.stride(0), C.stride(1), skip.stride(0), skip.stride(1) if skip.dim() == 2 else 0,
        gate.stride(0), gate.stride(1),
        H=heads, P=dim, N=state_size, HEADS_A_GROUP=heads // B.shape[1], HAS_D=D is not None,
        HAS_Z=z is not None, HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus,
        LIMITED=dt_limit != _NO_LIMIT, FORMAT=state_format(ssm_state), LANES=lanes, ROUNDS=rounding.rounds,
        BP=block, BN=columns, num_warps=warps, **launch_options(x.device),
    )  # fmt: skip


def _channels(
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
    out: Tensor,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    state_scale: Tensor | None,
    rounding: Rounding,
) -> None:
    rows, channels = x.shape
    state_size = ssm_state.shape[2]
    assert ssm_state.stride()[1:] == (state_size, 1), ssm_state.stride()
    assert A.stride(1) == 1, A.stride()
    assert dt.stride(1) == 1, dt.stride()
    narrow, scale, scale_slot = state_pointers(ssm_state, state_scale)
    lanes = _lanes(ssm_state, rounding)
    block, columns, warps = _blocks(channels, state_size, lanes, ssm_state.itemsize)
    gate = x if z is None else z
    _channels_kernel[(rows * triton.cdiv(channels, block * lanes),)](
        narrow, scale, x, dt, A, B, C, A if D is None else D, gate, A if dt_bias is None else dt_bias, slots, out,
        *draw_arguments(rounding, ssm_state), *dt_limit, ssm_state.stride(0), scale_slot, x.stride(0), dt.stride(0), A.stride(0), B.stride(0), C.stride(0),
        gate.stride(0),
        CHANNELS=channels, N=state_size, HAS_D=D is not None, HAS_Z=z is not None,
        HAS_BIAS=dt_bias is not None, SOFTPLUS=dt_softplus, LIMITED=dt_limit != _NO_LIMIT,
        FORMAT=state_format(ssm_state), LANES=lanes, ROUNDS=rounding.rounds, BC=block, BN=columns,
        num_warps=warps,
    )  # fmt: skip


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
    """See :class:`recurra.ops.ssm.SelectiveStateUpdate`. The output of padding rows is zero."""
    for name, tensor in (("x", x), ("B", B), ("C", C), ("z", x if z is None else z)):
        assert tensor.stride(-1) == 1, f"{name} strides {tensor.stride()}: unit last stride needed"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[0] == 0:
        return out
    form = _channels if ssm_state.dim() == 3 else _heads
    with torch.cuda.device_of(x):
        form(
            ssm_state, x, dt, A, B, C, D, z, dt_bias, slots, out, dt_softplus, dt_limit, state_scale, rounding
        )
    return out
