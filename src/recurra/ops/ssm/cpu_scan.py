"""Mamba-1's scan on the CPU: a unit of work is 64 channels of one sequence.

The recurrence runs down the tokens with 16 channels in a vector, one state element of each in a register
and its neighbours in the next registers; tiles of tokens keep step sizes, inputs and outputs in the
first-level cache, and nothing of size tokens x channels x N is ever written.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from recurra.ops.cpu.calls import (
    address,
    as_float32,
    row_bytes,
    run,
    table,
    threads_for,
    unit_rows,
)
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.maths import silu, softplus
from recurra.ops.cpu.subnormals import flush_subnormals, restore_mode
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.tiles import exp2, load_some, store_some, transpose
from recurra.ops.cpu.vectors import LANES, add, fma, get, load, mul, slot_at, splat, store, word
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import plain_states
from recurra.types import Chunks

_BLOCK = 64  # channels of a unit
_TILE = 16  # tokens of a tile
_ROW = 4 * _BLOCK
_TILE_BYTES = _TILE * _ROW


@kernel
def _open_tile(
    tile: int, x: int, x_row: int, dt: int, dt_row: int, tokens: int, width: int, bias: int, skip: int,
    plus: int,
) -> None:  # fmt: skip
    """Fill the tile's step sizes, dt * x and D * x."""
    for i in range(tokens):
        for c in range(0, width, LANES):
            some = width - c
            step = load_some(dt + i * dt_row + 4 * c, some)
            if bias:
                step = add(step, load_some(bias + 4 * c, some))
            if plus:
                step = softplus(step)
            value = load_some(x + i * x_row + 4 * c, some)
            at = tile + i * _ROW + 4 * c
            store(at, step)
            store(at + _TILE_BYTES, mul(step, value))
            store(at + 2 * _TILE_BYTES, mul(value, load_some(skip + 4 * c, some)) if skip else splat(0.0))


@kernel
def _recur(
    tile: int, h: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, tokens: int, some: int
) -> None:
    """Carry one state element of 16 channels through the tile, adding to its outputs."""
    rate, state = load_some(a, some), load(h)
    for i in range(tokens):
        at = tile + i * _ROW
        gain = mul(load(at + _TILE_BYTES), splat(get(b + i * b_row)))
        state = fma(state, exp2(mul(load(at), rate)), gain)
        store(at + 2 * _TILE_BYTES, fma(state, splat(get(c + i * c_row)), load(at + 2 * _TILE_BYTES)))
    store(h, state)


@kernel
def _recur_four(
    tile: int, h: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, tokens: int, some: int
) -> None:
    """As :func:`_recur` for four state elements, so that outputs are loaded and stored a quarter as often."""
    rate0, rate1 = load_some(a, some), load_some(a + a_row, some)
    rate2, rate3 = load_some(a + 2 * a_row, some), load_some(a + 3 * a_row, some)
    h0, h1, h2, h3 = load(h), load(h + _ROW), load(h + 2 * _ROW), load(h + 3 * _ROW)
    for i in range(tokens):
        at, bi, ci = tile + i * _ROW, b + i * b_row, c + i * c_row
        step, gain, y = load(at), load(at + _TILE_BYTES), load(at + 2 * _TILE_BYTES)
        h0 = fma(h0, exp2(mul(step, rate0)), mul(gain, splat(get(bi))))
        h1 = fma(h1, exp2(mul(step, rate1)), mul(gain, splat(get(bi + 4))))
        h2 = fma(h2, exp2(mul(step, rate2)), mul(gain, splat(get(bi + 8))))
        h3 = fma(h3, exp2(mul(step, rate3)), mul(gain, splat(get(bi + 12))))
        y = fma(h1, splat(get(ci + 4)), fma(h0, splat(get(ci)), y))
        y = fma(h3, splat(get(ci + 12)), fma(h2, splat(get(ci + 8)), y))
        store(at + 2 * _TILE_BYTES, y)
    store(h, h0)
    store(h + _ROW, h1)
    store(h + 2 * _ROW, h2)
    store(h + 3 * _ROW, h3)


@kernel
def _advance(
    tile: int, h: int, a: int, a_row: int, b: int, b_row: int, c: int, c_row: int, tokens: int, width: int,
    size: int,
) -> None:  # fmt: skip
    """Carry the states of all channels of the unit through the tile."""
    for lane in range(0, width, LANES):
        at, states, rates, some = tile + 4 * lane, h + 4 * lane, a + 4 * lane, width - lane
        whole = size // 4 * 4
        for n in range(0, whole, 4):
            _recur_four(
                at, states + n * _ROW, rates + n * a_row, a_row, b + 4 * n, b_row, c + 4 * n, c_row, tokens,
                some,
            )  # fmt: skip
        for n in range(whole, size):
            _recur(
                at, states + n * _ROW, rates + n * a_row, a_row, b + 4 * n, b_row, c + 4 * n, c_row, tokens,
                some,
            )  # fmt: skip


@kernel
def _close_tile(tile: int, z: int, z_row: int, out: int, out_row: int, tokens: int, width: int) -> None:
    """Gate the outputs and write them."""
    for i in range(tokens):
        for c in range(0, width, LANES):
            y = load(tile + 2 * _TILE_BYTES + i * _ROW + 4 * c)
            if z:
                y = mul(y, silu(load_some(z + i * z_row + 4 * c, width - c)))
            store_some(out + i * out_row + 4 * c, y, width - c)


@kernel
def _sequence(args: int, scratch: int, s: int, first: int) -> None:
    x, x_row, dt, dt_row = word(args, 1), word(args, 2), word(args, 3), word(args, 4)
    a, b, b_row, c, c_row = word(args, 5), word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    skip, z, z_row, bias = word(args, 10), word(args, 11), word(args, 12), word(args, 13)
    channels, size, plus, out = word(args, 14), word(args, 15), word(args, 16), word(args, 17)
    begin, end = slot_at(word(args, 18), s), slot_at(word(args, 18), s + 1)
    if begin >= end:
        return
    width = min(_BLOCK, channels - first)
    mine = word(args, 21) + slot_at(word(args, 19), s) * word(args, 22) + 4 * first * size
    h = scratch + 3 * _TILE_BYTES
    for i in range(0, size * _ROW, 4 * LANES):
        store(h + i, splat(0.0))
    if slot_at(word(args, 20), s):
        transpose(mine, 4 * size, h, _ROW, width, size)
    for t in range(begin, end, _TILE):
        tokens = min(_TILE, end - t)
        _open_tile(
            scratch, x + t * x_row + 4 * first, x_row, dt + t * dt_row + 4 * first, dt_row, tokens, width,
            bias + 4 * first if bias else 0, skip + 4 * first if skip else 0, plus,
        )  # fmt: skip
        _advance(
            scratch, h, a + 4 * first, 4 * channels, b + t * b_row, b_row, c + t * c_row, c_row, tokens, width,
            size,
        )  # fmt: skip
        _close_tile(
            scratch, z + t * z_row + 4 * first if z else 0, z_row, out + 4 * (t * channels + first),
            4 * channels, tokens, width,
        )  # fmt: skip
    transpose(h, _ROW, mine, 4 * size, size, width)


def _job(args: int, control: int, rank: int) -> None:
    scratch = word(args, 23) + rank * word(args, 24)
    blocks = word(args, 25)
    mode = flush_subnormals()
    while True:
        unit = claim(control)
        if unit >= word(args, 0):
            break
        _sequence(args, scratch, unit // blocks, unit % blocks * _BLOCK)
    restore_mode(mode)


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
    """See :class:`recurra.ops.ssm.SelectiveScanVarlen`.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    del chunks
    channels, size = A.shape
    xs, dts, Bs, Cs = unit_rows(x, "x"), unit_rows(dt, "dt"), unit_rows(B, "B"), unit_rows(C, "C")
    gate = None if z is None else unit_rows(z, "z")
    skip = None if D is None else as_float32(D, "D").contiguous()
    bias = None if dt_bias is None else as_float32(dt_bias, "dt_bias").contiguous()
    rates = (as_float32(A, "A") * math.log2(math.e)).t().contiguous()  # (N, channels), for powers of two
    states = plain_states(ssm_state, state_scale, slots, rounding)
    bounds = cu_seqlens.to(torch.int32).contiguous()
    known = has_state.to(torch.int32).contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    blocks = -(-channels // _BLOCK)
    units = blocks * slots.shape[0]
    threads = threads_for(units)
    scratch = torch.empty(threads, (3 * _TILE + size) * _BLOCK)
    run(
        _job,
        table(
            units, xs.data_ptr(), row_bytes(xs), dts.data_ptr(), row_bytes(dts), rates.data_ptr(),
            Bs.data_ptr(), row_bytes(Bs), Cs.data_ptr(), row_bytes(Cs), address(skip),
            address(gate), 0 if gate is None else row_bytes(gate), address(bias), channels, size,
            int(dt_softplus), out.data_ptr(), bounds.data_ptr(), states.slots.data_ptr(), known.data_ptr(),
            states.rows.data_ptr(), row_bytes(states.rows), scratch.data_ptr(), row_bytes(scratch), blocks,
        ),
        threads,
    )  # fmt: skip
    states.commit(bounds)
    return out.to(x.dtype)
