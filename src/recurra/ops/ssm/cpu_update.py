"""One step of the selective recurrence on the CPU: a unit of work is some channels, or a head, of a sequence."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurra.ops.cpu.calls import address as pointer_of
from recurra.ops.cpu.calls import as_float32, row_bytes, table, unit_rows
from recurra.ops.cpu.jit import address, kernel
from recurra.ops.cpu.maths import exp, silu, softplus
from recurra.ops.cpu.threads import claim, finish, thread_pool, wait_done
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import (
    LANES,
    add,
    fma,
    get,
    load,
    mul,
    prefetch,
    put,
    real,
    slot_at,
    splat,
    store,
    total,
    where_less,
    word,
)
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import chance_words, stored_words
from recurra.ops.rounding.cpu_rows import BLOCK_ROWS, SPARE, close_block, open_block

_NO_LIMIT = (0.0, float("inf"))
_CHANNELS = 256  # channels of a Mamba-1 unit
_AHEAD = 8  # rows of a head's state that are asked for before their turn


@kernel
def step_size(raw: Any, bias: Any, apply_softplus: int, low: Any, high: Any) -> Any:
    """dt = softplus(raw + bias), held between two bounds; NaN goes through."""
    dt = add(raw, bias)
    if apply_softplus:
        dt = softplus(dt)
    dt = where_less(dt, low, low, dt)
    return where_less(high, dt, high, dt)


@kernel
def step_sizes(
    raw: int, bias: int, out: int, count: int, apply_softplus: int, low: float, high: float
) -> None:
    """:func:`step_size` of ``count`` channels; bias 0 means none."""
    for c in range(0, count, LANES):
        b = load_some(bias + 4 * c, count - c) if bias else splat(0.0)
        dt = step_size(load_some(raw + 4 * c, count - c), b, apply_softplus, splat(low), splat(high))
        store_some(out + 4 * c, dt, count - c)


@kernel
def update_channels(state: int, x: int, dt: int, A: int, B: int, C: int, y: int, count: int, N: int) -> None:
    """Mamba-1: ``state = exp(dt A) state + dt x B`` and ``y = state . C`` for ``count`` channels."""
    for c in range(count):
        step = splat(get(dt + 4 * c))
        dx = mul(step, splat(get(x + 4 * c)))
        sums = splat(0.0)
        for n in range(0, N, LANES):
            row = 4 * (c * N + n)
            old = load_some(state + row, N - n)
            decay = exp(mul(step, load_some(A + row, N - n)))
            new = fma(decay, old, mul(dx, load_some(B + 4 * n, N - n)))
            store_some(state + row, new, N - n)
            sums = fma(new, load_some(C + 4 * n, N - n), sums)
        put(y + 4 * c, total(sums))


@kernel
def update_head(
    state: int, x: int, dt: Any, A: Any, B: int, C: int, y: int, P: int, N: int, following: int
) -> None:
    """Mamba-2: the same for the P rows of a head, which share dt and A (the vectors hold one value).

    ``following`` is what the thread will probably read next; nothing depends on it but time.
    """
    decay = exp(mul(dt, A))
    whole = N - N % LANES
    for p in range(P):
        dx = mul(dt, splat(get(x + 4 * p)))
        sums = splat(0.0)
        row = state + 4 * p * N
        ahead = row + 4 * _AHEAD * N if p + _AHEAD < P else following + 4 * (p + _AHEAD - P) * N
        for n in range(0, whole, LANES):
            prefetch(ahead + 4 * n)
            new = fma(decay, load(row + 4 * n), mul(dx, load(B + 4 * n)))
            store(row + 4 * n, new)
            sums = fma(new, load(C + 4 * n), sums)
        if whole < N:
            old = load_some(row + 4 * whole, N - whole)
            new = fma(decay, old, mul(dx, load_some(B + 4 * whole, N - whole)))
            store_some(row + 4 * whole, new, N - whole)
            sums = fma(new, load_some(C + 4 * whole, N - whole), sums)
        put(y + 4 * p, total(sums))


@kernel
def update_stored_head(
    stored: int, at: int, slot: int, h: int, x: int, dt: Any, A: Any, B: int, C: int, y: int, P: int, N: int,
    work: int,
) -> None:  # fmt: skip
    """As :func:`update_head` for head ``h`` of a narrow state, a few rows at a time.

    Args:
        stored: address of the state's words (``recurra.ops.rounding.cpu.stored_words``).
        at: address of the slot's first number.
        work: address of ``work_floats(N)`` float32.
    """
    for p in range(0, P, BLOCK_ROWS):
        rows, row = min(BLOCK_ROWS, P - p), h * P + p
        open_block(stored, at, slot, row, rows, N, work)
        state = work + 4 * SPARE
        update_head(state, x + 4 * p, dt, A, B, C, y + 4 * p, rows, N, state)
        close_block(stored, at, slot, row, rows, N, work, (h * ((P + 7) // 8) + p // 8) * N)


@kernel
def update_stored_channels(
    stored: int, at: int, slot: int, first: int, x: int, dt: int, A: int, B: int, C: int, y: int, count: int,
    N: int, work: int,
) -> None:  # fmt: skip
    """As :func:`update_channels` for channels of a narrow state; ``first`` is a multiple of 8."""
    for c in range(0, count, BLOCK_ROWS):
        rows, row = min(BLOCK_ROWS, count - c), first + c
        open_block(stored, at, slot, row, rows, N, work)
        state = work + 4 * SPARE
        update_channels(state, x + 4 * c, dt + 4 * c, A + 4 * c * N, B, C, y + 4 * c, rows, N)
        close_block(stored, at, slot, row, rows, N, work, row // 8 * N)


def work_floats(N: int) -> int:
    """Float32 numbers that a thread needs to update narrow states of N columns."""
    return SPARE + BLOCK_ROWS * N + LANES


@kernel
def skip_and_gate(y: int, x: int, D: int, D_step: int, z: int, count: int) -> None:
    """``y = (y + D x) * silu(z)``; D 0 or z 0 means none. D_step: 1 for a D of each value, 0 for one D."""
    for c in range(0, count, LANES):
        some = count - c
        out = load_some(y + 4 * c, some)
        if D:
            d = load_some(D + 4 * c, some) if D_step else splat(get(D))
            out = fma(d, load_some(x + 4 * c, some), out)
        if z:
            out = mul(out, silu(load_some(z + 4 * c, some)))
        store_some(y + 4 * c, out, some)


@kernel
def clear(y: int, count: int) -> None:
    """Zeros, for padding rows."""
    for c in range(0, count, LANES):
        store_some(y + 4 * c, splat(0.0), count - c)


def _job1(args: int, control: int, rank: int) -> None:
    """Mamba-1; the words are those that :func:`_arguments` packs."""
    S, channels, N = word(args, 0), word(args, 1), word(args, 2)
    dt_buffer, apply_softplus, low, high = word(args, 22), word(args, 23), real(args, 24), real(args, 25)
    blocks = (channels + _CHANNELS - 1) // _CHANNELS
    ticket = claim(control)
    while ticket < S * blocks:
        s, c = ticket // blocks, ticket % blocks * _CHANNELS
        count = min(_CHANNELS, channels - c)
        y = word(args, 20) + 4 * (s * channels + c)
        if slot_at(word(args, 6), s) == 0:
            clear(y, count)
        else:
            x = word(args, 8) + s * word(args, 9) + 4 * c
            dt = dt_buffer + 4 * (s * channels + c)
            raw = word(args, 10) + s * word(args, 11) + 4 * c
            bias, D, z = word(args, 19), word(args, 17), word(args, 21)
            step_sizes(raw, bias + 4 * c if bias else 0, dt, count, apply_softplus, low, high)
            slot = slot_at(word(args, 6), s)
            state = word(args, 4) + slot * word(args, 5)
            A = word(args, 12) + 4 * c * N
            B, C = word(args, 13) + s * word(args, 14), word(args, 15) + s * word(args, 16)
            if word(args, 7):
                work = word(args, 27) + rank * word(args, 28)
                update_stored_channels(word(args, 7), state, slot, c, x, dt, A, B, C, y, count, N, work)
            else:
                update_channels(state + 4 * c * N, x, dt, A, B, C, y, count, N)
            gate = z + s * word(args, 26) + 4 * c if z else 0
            skip_and_gate(y, x, D + 4 * c if D else 0, 1, gate, count)
        ticket = finish(control)
    if rank == 0:
        wait_done(control, S * blocks)


def _job2(args: int, control: int, rank: int) -> None:
    """Mamba-2; the words are those that :func:`_arguments` packs."""
    S, H, N, P = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    per_group, apply_softplus, low, high = word(args, 22), word(args, 23), real(args, 24), real(args, 25)
    ticket = claim(control)
    while ticket < S * H:
        s, h = ticket // H, ticket % H
        y = word(args, 20) + 4 * (s * H + h) * P
        if slot_at(word(args, 6), s) == 0:
            clear(y, P)
        else:
            x = word(args, 8) + s * word(args, 9) + 4 * h * P
            bias, D, z = word(args, 19), word(args, 17), word(args, 21)
            b = splat(get(bias + 4 * h)) if bias else splat(0.0)
            raw = splat(get(word(args, 10) + s * word(args, 11) + 4 * h))
            dt = step_size(raw, b, apply_softplus, splat(low), splat(high))
            slot = slot_at(word(args, 6), s)
            state = word(args, 4) + slot * word(args, 5)
            A = splat(get(word(args, 12) + 4 * h))
            g = 4 * (h // per_group) * N
            B, C = word(args, 13) + s * word(args, 14) + g, word(args, 15) + s * word(args, 16) + g
            if word(args, 7):
                work = word(args, 27) + rank * word(args, 28)
                update_stored_head(word(args, 7), state, slot, h, x, dt, A, B, C, y, P, N, work)
            else:
                # What follows is the next head in memory, whoever takes it: second-level caches are small
                # beside states.
                state += 4 * h * P * N
                update_head(state, x, dt, A, B, C, y, P, N, state + 4 * P * N)
            D_step = word(args, 18)
            skip = D + 4 * (h * P if D_step else h) if D else 0
            skip_and_gate(y, x, skip, D_step, z + s * word(args, 26) + 4 * h * P if z else 0, P)
        ticket = finish(control)
    if rank == 0:
        wait_done(control, S * H)


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
    """See :class:`recurra.ops.ssm.SelectiveStateUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    first = ssm_state.dim() == 3
    given = slots.to(torch.int32).contiguous()
    assert ssm_state[0].is_contiguous(), ssm_state.stride()
    chance = chance_words(rounding)
    stored = None if ssm_state.dtype == torch.float32 else stored_words(ssm_state, state_scale, chance)
    threads = torch.get_num_threads()
    work = torch.empty(threads, work_floats(ssm_state.shape[-1]) if stored is not None else 0)
    rows = {"x": x, "dt": dt, "B": B, "C": C} | ({} if z is None else {"z": z})
    wide = {name: unit_rows(tensor, name) for name, tensor in rows.items()}
    A = as_float32(A, "A").contiguous()
    skip = None if D is None else as_float32(D, "D").contiguous()
    bias = None if dt_bias is None else as_float32(dt_bias, "dt_bias").contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    S, width = x.shape[:2]
    steps = torch.empty(x.shape if first else (0,), dtype=torch.float32)
    gate = wide.get("z")
    arguments = table(
        S, width, ssm_state.shape[-1], 1 if first else x.shape[2], ssm_state.data_ptr(), row_bytes(ssm_state),
        given.data_ptr(), pointer_of(stored), wide["x"].data_ptr(), row_bytes(wide["x"]),
        wide["dt"].data_ptr(), row_bytes(wide["dt"]), A.data_ptr(), wide["B"].data_ptr(), row_bytes(wide["B"]),
        wide["C"].data_ptr(), row_bytes(wide["C"]), pointer_of(skip), int(skip is not None and skip.dim() == 2),
        pointer_of(bias), out.data_ptr(), pointer_of(gate),
        steps.data_ptr() if first else width // B.shape[1],
        int(dt_softplus), float(dt_limit[0]) if dt_limit != _NO_LIMIT else -float("inf"), float(dt_limit[1]),
        0 if gate is None else row_bytes(gate), work.data_ptr(), row_bytes(work),
    )  # fmt: skip
    thread_pool(threads).run(address(_job1 if first else _job2), arguments.numpy())
    return out.to(x.dtype)
