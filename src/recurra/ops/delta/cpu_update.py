"""One step of the gated delta rule on the CPU: a unit of work is a head of a sequence.

A panel of 64 columns of the state is decayed and read out, then corrected and read again while it is still
in the core's first cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recurra.ops.cpu.calls import as_float32, row_bytes, run, table, threads_for, unit_rows
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.maths import exp
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import (
    LANES,
    fma,
    get,
    load,
    mul,
    real,
    slot_at,
    splat,
    store,
    sub,
    total,
    word,
)
from recurra.ops.delta import NORM_EPS, check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import plain_states

_PANEL = 4 * LANES


@kernel
def _normalised(x: int, out: int, count: int, norm: int, scale: float) -> None:
    """``scale * x``, over the norm of x if asked."""
    factor = np.float32(scale)
    if norm:
        squares = splat(0.0)
        for c in range(0, count, LANES):
            part = load_some(x + 4 * c, count - c)
            squares = fma(part, part, squares)
        factor = np.float32(scale / np.sqrt(np.float64(total(squares)) + NORM_EPS))
    for c in range(0, count, LANES):
        store_some(out + 4 * c, mul(splat(factor), load_some(x + 4 * c, count - c)), count - c)


@kernel
def _decays(g: int, step: int, out: int, count: int) -> None:
    """exp(g) of each channel; one g for all of them when ``step`` is 0."""
    for c in range(0, count, LANES):
        log = load_some(g + 4 * c, count - c) if step else splat(get(g))
        store_some(out + 4 * c, exp(log), count - c)


@kernel
def _panel(state: int, row: int, q: int, k: int, d: int, v: int, y: int, keys: int, beta: float) -> None:
    """64 columns of a head."""
    h0, h1, h2, h3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(keys):
        at, decay, ki = state + i * row, splat(get(d + 4 * i)), splat(get(k + 4 * i))
        s0, s1 = mul(decay, load(at)), mul(decay, load(at + 64))
        s2, s3 = mul(decay, load(at + 128)), mul(decay, load(at + 192))
        store(at, s0)
        store(at + 64, s1)
        store(at + 128, s2)
        store(at + 192, s3)
        h0, h1, h2, h3 = fma(ki, s0, h0), fma(ki, s1, h1), fma(ki, s2, h2), fma(ki, s3, h3)
    b = splat(beta)
    u0, u1 = mul(b, sub(load(v), h0)), mul(b, sub(load(v + 64), h1))
    u2, u3 = mul(b, sub(load(v + 128), h2)), mul(b, sub(load(v + 192), h3))
    y0, y1, y2, y3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(keys):
        at, ki, qi = state + i * row, splat(get(k + 4 * i)), splat(get(q + 4 * i))
        s0, s1 = fma(ki, u0, load(at)), fma(ki, u1, load(at + 64))
        s2, s3 = fma(ki, u2, load(at + 128)), fma(ki, u3, load(at + 192))
        store(at, s0)
        store(at + 64, s1)
        store(at + 128, s2)
        store(at + 192, s3)
        y0, y1, y2, y3 = fma(qi, s0, y0), fma(qi, s1, y1), fma(qi, s2, y2), fma(qi, s3, y3)
    store(y, y0)
    store(y + 64, y1)
    store(y + 128, y2)
    store(y + 192, y3)


@kernel
def _column(
    state: int, row: int, q: int, k: int, d: int, v: int, y: int, keys: int, beta: float, some: int
) -> None:
    """Up to 16 columns."""
    held: Any = splat(0.0)
    for i in range(keys):
        at = state + i * row
        s = mul(splat(get(d + 4 * i)), load_some(at, some))
        store_some(at, s, some)
        held = fma(splat(get(k + 4 * i)), s, held)
    u = mul(splat(beta), sub(load_some(v, some), held))
    acc: Any = splat(0.0)
    for i in range(keys):
        at = state + i * row
        s = fma(splat(get(k + 4 * i)), u, load_some(at, some))
        store_some(at, s, some)
        acc = fma(splat(get(q + 4 * i)), s, acc)
    store_some(y, acc, some)


@kernel
def _head(args: int, s: int, h: int, scratch: int, y: int) -> None:
    """One head of one sequence; scratch holds its q, k and decays."""
    keys, values, step = word(args, 2), word(args, 3), word(args, 4)
    key_head = h // word(args, 5)
    row = 4 * values
    state = word(args, 8) + slot_at(word(args, 7), s) * word(args, 9) + 4 * h * keys * values
    q, k, d = scratch, scratch + 4 * keys, scratch + 8 * keys
    _normalised(
        word(args, 10) + s * word(args, 11) + 4 * key_head * keys, q, keys, word(args, 20), real(args, 21)
    )
    _normalised(word(args, 12) + s * word(args, 13) + 4 * key_head * keys, k, keys, word(args, 20), 1.0)
    _decays(word(args, 16) + s * word(args, 17) + 4 * h * (keys if step else 1), step, d, keys)
    beta = get(word(args, 18) + s * word(args, 19) + 4 * h)
    v = word(args, 14) + s * word(args, 15) + 4 * h * values
    c = 0
    while values - c >= _PANEL:
        _panel(state + 4 * c, row, q, k, d, v + 4 * c, y + 4 * c, keys, beta)
        c += _PANEL
    while c < values:
        _column(state + 4 * c, row, q, k, d, v + 4 * c, y + 4 * c, keys, beta, values - c)
        c += LANES


def _job(args: int, control: int, rank: int) -> None:
    units, heads, values = word(args, 0), word(args, 1), word(args, 3)
    scratch = word(args, 23) + rank * word(args, 24)
    while True:
        unit = claim(control)
        if unit >= units:
            break
        s, h = unit // heads, unit % heads
        y = word(args, 22) + 4 * unit * values
        if slot_at(word(args, 6), s) == 0:
            for c in range(0, values, LANES):
                store_some(y + 4 * c, splat(0.0), values - c)
        else:
            _head(args, s, h, scratch, y)


def gated_delta_rule_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    slots: Tensor,
    *,
    scale: float,
    qk_l2norm: bool,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.delta.GatedDeltaRuleUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    check_shapes(q, k, v, g, beta, state)
    rows, key_heads, keys = q.shape
    heads, values = v.shape[1:]
    given = slots.to(torch.int32).contiguous()
    states = plain_states(state, state_scale, given, rounding)
    qs, ks, vs = unit_rows(q, "q"), unit_rows(k, "k"), unit_rows(v, "v")
    gs, bs = unit_rows(g, "g"), as_float32(beta, "beta").contiguous()
    out = torch.empty(v.shape, dtype=torch.float32)
    threads = threads_for(rows * heads)
    scratch = torch.empty(threads, 3 * keys + LANES)
    arguments = table(
        rows * heads, heads, keys, values, int(g.dim() == 3), heads // key_heads, given.data_ptr(),
        states.slots.data_ptr(), states.rows.data_ptr(), row_bytes(states.rows), qs.data_ptr(), row_bytes(qs),
        ks.data_ptr(), row_bytes(ks), vs.data_ptr(), row_bytes(vs), gs.data_ptr(), row_bytes(gs),
        bs.data_ptr(), row_bytes(bs), int(qk_l2norm), float(scale), out.data_ptr(), scratch.data_ptr(),
        row_bytes(scratch),
    )  # fmt: skip
    run(_job, arguments, threads)
    states.commit(torch.arange(rows + 1))
    return out.to(v.dtype)
