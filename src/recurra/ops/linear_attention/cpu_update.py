"""One step of lightning attention on the CPU: a unit of work is a head of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.cpu.calls import as_float32, row_bytes, run, table, threads_for, unit_rows
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import LANES, fma, get, load, mul, real, slot_at, splat, store, word
from recurra.ops.linear_attention import check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import plain_states

_PANEL = 4 * LANES  # columns whose values and outputs stay in registers


@kernel
def _panel(
    state: int, row: int, q: int, k: int, v: int, y: int, keys: int, decay: float, scale: float
) -> None:
    """64 columns of a head: all rows of the state, read and written once."""
    d = splat(decay)
    v0, v1, v2, v3 = load(v), load(v + 64), load(v + 128), load(v + 192)
    y0, y1, y2, y3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(keys):
        at, ki, qi = state + i * row, splat(get(k + 4 * i)), splat(get(q + 4 * i))
        s0, s1 = fma(ki, v0, mul(d, load(at))), fma(ki, v1, mul(d, load(at + 64)))
        s2, s3 = fma(ki, v2, mul(d, load(at + 128))), fma(ki, v3, mul(d, load(at + 192)))
        store(at, s0)
        store(at + 64, s1)
        store(at + 128, s2)
        store(at + 192, s3)
        y0, y1, y2, y3 = fma(qi, s0, y0), fma(qi, s1, y1), fma(qi, s2, y2), fma(qi, s3, y3)
    by = splat(scale)
    store(y, mul(by, y0))
    store(y + 64, mul(by, y1))
    store(y + 128, mul(by, y2))
    store(y + 192, mul(by, y3))


@kernel
def _column(
    state: int, row: int, q: int, k: int, v: int, y: int, keys: int, decay: float, scale: float, some: int
) -> None:
    """Up to 16 columns."""
    d, values, acc = splat(decay), load_some(v, some), splat(0.0)
    for i in range(keys):
        at = state + i * row
        s = fma(splat(get(k + 4 * i)), values, mul(d, load_some(at, some)))
        store_some(at, s, some)
        acc = fma(splat(get(q + 4 * i)), s, acc)
    store_some(y, mul(splat(scale), acc), some)


def _job(args: int, control: int, rank: int) -> None:
    units, heads, keys, values = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    row = 4 * values
    while True:
        unit = claim(control)
        if unit >= units:
            break
        s, h = unit // heads, unit % heads
        y = word(args, 14) + 4 * unit * values
        if slot_at(word(args, 4), s) == 0:
            for c in range(0, values, LANES):
                store_some(y + 4 * c, splat(0.0), values - c)
            continue
        state = word(args, 6) + slot_at(word(args, 5), s) * word(args, 7) + 4 * h * keys * values
        q = word(args, 8) + s * word(args, 9) + 4 * h * keys
        k = word(args, 10) + s * word(args, 11) + 4 * h * keys
        v = word(args, 12) + s * word(args, 13) + 4 * h * values
        decay, scale = get(word(args, 15) + 4 * h), real(args, 16)
        c = 0
        while values - c >= _PANEL:
            _panel(state + 4 * c, row, q, k, v + 4 * c, y + 4 * c, keys, decay, scale)
            c += _PANEL
        while c < values:
            _column(state + 4 * c, row, q, k, v + 4 * c, y + 4 * c, keys, decay, scale, values - c)
            c += LANES


def lightning_attention_update(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    slots: Tensor,
    *,
    scale: float = 1.0,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.linear_attention.LightningAttentionUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    check_shapes(q, k, v, log_decay, state)
    rows, heads, keys = q.shape
    values = v.shape[2]
    given = slots.to(torch.int32).contiguous()
    states = plain_states(state, state_scale, given, rounding)
    qs, ks, vs = unit_rows(q, "q"), unit_rows(k, "k"), unit_rows(v, "v")
    decay = torch.exp(as_float32(log_decay, "log_decay")).contiguous()
    out = torch.empty(v.shape, dtype=torch.float32)
    arguments = table(
        rows * heads, heads, keys, values, given.data_ptr(), states.slots.data_ptr(), states.rows.data_ptr(),
        row_bytes(states.rows), qs.data_ptr(), row_bytes(qs), ks.data_ptr(), row_bytes(ks), vs.data_ptr(),
        row_bytes(vs), out.data_ptr(), decay.data_ptr(), float(scale),
    )  # fmt: skip
    run(_job, arguments, threads_for(rows * heads))
    states.commit(torch.arange(rows + 1))
    return out.to(v.dtype)
