"""Mamba-2's scan on the CPU, in chunks of matrix products written for vector registers.

Within a chunk, with ``c_i`` the sum of ``dt * A`` up to token i,

    y_i     = exp(c_i) C_i . state  +  sum over j <= i of (C_i . B_j) exp(c_i - c_j) dt_j x_j  +  D x_i
    state'  = exp(c_L) state  +  sum over j of exp(c_L - c_j) dt_j x_j (outer) B_j

(Dao and Gu, 2024, section 6). Two jobs: the products ``C_i . B_j``, once a group, a unit being a chunk
of a group; then everything else, a unit being a head of a sequence, whose state stays in the second-level cache.
Logarithms of decay are summed in float64 and kept in two float32 parts: differences of long sums stay exact.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
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
from recurra.ops.cpu.maths import softplus
from recurra.ops.cpu.subnormals import flush_subnormals, restore_mode
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.tiles import exp2, load_some, store_some, transpose
from recurra.ops.cpu.vectors import (
    LANES,
    add,
    fma,
    get,
    load,
    mul,
    put,
    real,
    slot_at,
    splat,
    store,
    sub,
    total,
    where_less,
    word,
)
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import plain_states
from recurra.types import Chunks

_Q = 64  # tokens of a chunk: longer ones cost more within the chunk than they save outside
_LOG2E = math.log2(math.e)
_PAIR = 2 * LANES  # columns that a block of products covers; head dims are padded to it in scratch
_QUAD = 4  # its rows
_LINE = 4 * _Q  # bytes of a row of the scratch vectors and of C . B
_PANEL = 4 * _PAIR  # bytes of a row of inputs or states: 32 columns, so that products stream
_VECTORS = 5  # scratch rows ahead of the weights


@kernel
def _dot(a: int, b: int, size: int) -> Any:
    """Lane-wise partial sums of a dot product."""
    acc = splat(0.0)
    for n in range(0, size, LANES):
        acc = fma(load_some(a + 4 * n, size - n), load_some(b + 4 * n, size - n), acc)
    return acc


@kernel
def _pack(b: int, b_row: int, tokens: int, size: int, packed: int) -> None:
    """B of a chunk by quads of n: four of token 0, four of token 1 ...; zeros beyond N."""
    for n in range(0, size, _QUAD):
        for j in range(tokens):
            for k in range(_QUAD):
                put(packed, get(b + j * b_row + 4 * (n + k)) if n + k < size else 0.0)
                packed += 4


@kernel
def _products(b: int, b_row: int, c: int, c_row: int, tokens: int, size: int, out: int) -> None:
    """``C_i . B_j`` for j <= i of a chunk; what lies above the diagonal stays unwritten."""
    for i in range(tokens):
        row, at = c + i * c_row, out + i * _LINE
        for j in range(0, i + 1, 2):
            near, far = _dot(row, b + j * b_row, size), _dot(row, b + min(j + 1, i) * b_row, size)
            put(at + 4 * j, total(near))
            if j < i:
                put(at + 4 * j + 4, total(far))


def _groups_job(args: int, control: int, rank: int) -> None:
    """What the heads of a group share, for each chunk: products and the packed B."""
    units, groups, size = word(args, 0), word(args, 1), word(args, 2)
    b, b_row, c, c_row = word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    starts, lengths, out = word(args, 7), word(args, 8), word(args, 9)
    packed, packed_row = word(args, 10), word(args, 11)
    mode = flush_subnormals()
    while True:
        unit = claim(control)
        if unit >= units:
            break
        chunk, group = unit // groups, unit % groups
        start, tokens = slot_at(starts, chunk), slot_at(lengths, chunk)
        rows = b + start * b_row + 4 * group * size
        _products(
            rows, b_row, c + start * c_row + 4 * group * size, c_row, tokens, size, out + unit * _Q * _LINE
        )
        _pack(rows, b_row, tokens, size, packed + unit * packed_row)
    restore_mode(mode)


@kernel
def _steps(
    dt: int, dt_row: int, tokens: int, bias: Any, plus: int, low: float, high: float, scratch: int
) -> None:
    """Row 0 of scratch: the step sizes of one head in a chunk."""
    for i in range(tokens):
        put(scratch + 4 * i, np.float32(get(dt + i * dt_row) + bias))
    for i in range(tokens, _Q):
        put(scratch + 4 * i, 0.0)
    for i in range(0, tokens, LANES):
        step = load(scratch + 4 * i)
        if plus:
            step = softplus(step)
        step = where_less(step, splat(low), splat(low), step)
        step = where_less(splat(high), step, splat(high), step)
        store(scratch + 4 * i, step)


@kernel
def _decays(tokens: int, rate: float, scratch: int) -> None:
    """Rows 1 and 2: the two parts of c_i (in powers of two); row 3: exp(c_i); row 4: exp(c_last - c_i)."""
    high, low = scratch + _LINE, scratch + 2 * _LINE
    summed = 0.0
    for i in range(_Q):
        if i < tokens:
            summed += np.float64(get(scratch + 4 * i)) * np.float64(rate) * _LOG2E
        part = np.float32(summed)
        put(high + 4 * i, part)
        put(low + 4 * i, np.float32(summed - np.float64(part)))
    last_high, last_low = splat(get(high + 4 * (tokens - 1))), splat(get(low + 4 * (tokens - 1)))
    for i in range(0, tokens, LANES):
        at, rest = load(high + 4 * i), load(low + 4 * i)
        store(scratch + 3 * _LINE + 4 * i, exp2(add(at, rest)))
        store(scratch + 4 * _LINE + 4 * i, exp2(add(sub(last_high, at), sub(last_low, rest))))


@kernel
def _inputs(x: int, x_row: int, tokens: int, left_columns: int, scratch: int, xs: int, ws: int) -> None:
    """32 columns of ``dt_j x_j``, and of the same times exp(c_last - c_j); zeros in the padding."""
    for j in range(tokens):
        step, left = splat(get(scratch + 4 * j)), splat(get(scratch + 4 * _LINE + 4 * j))
        first = mul(step, load_some(x + j * x_row, left_columns))
        second = mul(step, load_some(x + j * x_row + 4 * LANES, left_columns - LANES))
        store(xs + j * _PANEL, first)
        store(xs + j * _PANEL + 4 * LANES, second)
        store(ws + j * _PANEL, mul(left, first))
        store(ws + j * _PANEL + 4 * LANES, mul(left, second))


@kernel
def _weights(products: int, tokens: int, scratch: int, out: int) -> None:
    """``(C_i . B_j) exp(c_i - c_j)`` for j <= i."""
    high, low = scratch + _LINE, scratch + 2 * _LINE
    for i in range(tokens):
        own_high, own_low = splat(get(high + 4 * i)), splat(get(low + 4 * i))
        for j in range(0, i + 1, LANES):
            between = add(sub(own_high, load(high + 4 * j)), sub(own_low, load(low + 4 * j)))
            store(out + i * _LINE + 4 * j, mul(load(products + i * _LINE + 4 * j), exp2(between)))


@kernel
def _finish(y: int, first: Any, second: Any, x: int, skip: int, by_column: int, left: int) -> None:
    """Add ``D x`` and write a pair of vectors, ``left`` columns of which are the head's own."""
    if skip:
        a = load_some(skip, left) if by_column else splat(get(skip))
        b = load_some(skip + 4 * LANES, left - LANES) if by_column else a
        first = fma(a, load_some(x, left), first)
        second = fma(b, load_some(x + 4 * LANES, left - LANES), second)
    store_some(y, first, left)
    store_some(y + 4 * LANES, second, left - LANES)


@kernel
def _outputs(
    i: int, tokens: int, size: int, h: int, known: int, c: int, c_row: int, xs: int, w: int, scratch: int,
    x: int, x_row: int, y: int, y_row: int, skip: int, by_column: int, left_columns: int,
) -> None:  # fmt: skip
    """Outputs of tokens i to i + 3 in 32 columns. Rows past the chunk repeat its last and aren't written."""
    last = tokens - 1
    i1, i2, i3 = min(i + 1, last), min(i + 2, last), min(i + 3, last)
    a0, a1, b0, b1 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    d0, d1, e0, e1 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    if known:
        r0, r1, r2, r3 = c + i * c_row, c + i1 * c_row, c + i2 * c_row, c + i3 * c_row
        for n in range(size):
            left, right = load(h + n * _PANEL), load(h + n * _PANEL + 4 * LANES)
            s0, s1 = splat(get(r0 + 4 * n)), splat(get(r1 + 4 * n))
            s2, s3 = splat(get(r2 + 4 * n)), splat(get(r3 + 4 * n))
            a0, a1, b0, b1 = fma(s0, left, a0), fma(s0, right, a1), fma(s1, left, b0), fma(s1, right, b1)
            d0, d1, e0, e1 = fma(s2, left, d0), fma(s2, right, d1), fma(s3, left, e0), fma(s3, right, e1)
        decays = scratch + 3 * _LINE
        s0, s1 = splat(get(decays + 4 * i)), splat(get(decays + 4 * i1))
        s2, s3 = splat(get(decays + 4 * i2)), splat(get(decays + 4 * i3))
        a0, a1, b0, b1 = mul(a0, s0), mul(a1, s0), mul(b0, s1), mul(b1, s1)
        d0, d1, e0, e1 = mul(d0, s2), mul(d1, s2), mul(e0, s3), mul(e1, s3)
    w0, w1, w2, w3 = w + i * _LINE, w + i1 * _LINE, w + i2 * _LINE, w + i3 * _LINE
    for j in range(i + 1):
        left, right = load(xs + j * _PANEL), load(xs + j * _PANEL + 4 * LANES)
        s0, s1 = splat(get(w0 + 4 * j)), splat(get(w1 + 4 * j))
        s2, s3 = splat(get(w2 + 4 * j)), splat(get(w3 + 4 * j))
        a0, a1, b0, b1 = fma(s0, left, a0), fma(s0, right, a1), fma(s1, left, b0), fma(s1, right, b1)
        d0, d1, e0, e1 = fma(s2, left, d0), fma(s2, right, d1), fma(s3, left, e0), fma(s3, right, e1)
    _finish(y + i * y_row, a0, a1, x + i * x_row, skip, by_column, left_columns)
    for k in range(i + 1, min(i + _QUAD, tokens)):  # below the diagonal of the four rows
        left, right = load(xs + k * _PANEL), load(xs + k * _PANEL + 4 * LANES)
        if k <= i + 1:
            s1 = splat(get(w1 + 4 * k))
            b0, b1 = fma(s1, left, b0), fma(s1, right, b1)
        if k <= i + 2:
            s2 = splat(get(w2 + 4 * k))
            d0, d1 = fma(s2, left, d0), fma(s2, right, d1)
        s3 = splat(get(w3 + 4 * k))
        e0, e1 = fma(s3, left, e0), fma(s3, right, e1)
    if i + 1 < tokens:
        _finish(y + i1 * y_row, b0, b1, x + i1 * x_row, skip, by_column, left_columns)
    if i + 2 < tokens:
        _finish(y + i2 * y_row, d0, d1, x + i2 * x_row, skip, by_column, left_columns)
    if i + 3 < tokens:
        _finish(y + i3 * y_row, e0, e1, x + i3 * x_row, skip, by_column, left_columns)


@kernel
def _advance(h: int, known: int, decay: float, packed: int, ws: int, tokens: int, size: int) -> None:
    """``state = decay * state + B^T (weighted inputs)`` in 32 columns, four rows of N at a time."""
    s = splat(decay)
    for n in range(0, size, _QUAD):
        a0, a1, b0, b1 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        d0, d1, e0, e1 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        row = h + n * _PANEL
        if known:
            a0, a1 = mul(load(row), s), mul(load(row + 4 * LANES), s)
            b0, b1 = mul(load(row + _PANEL), s), mul(load(row + _PANEL + 4 * LANES), s)
            d0, d1 = mul(load(row + 2 * _PANEL), s), mul(load(row + 2 * _PANEL + 4 * LANES), s)
            e0, e1 = mul(load(row + 3 * _PANEL), s), mul(load(row + 3 * _PANEL + 4 * LANES), s)
        source = packed + 4 * n * tokens
        for j in range(tokens):
            left, right = load(ws + j * _PANEL), load(ws + j * _PANEL + 4 * LANES)
            at = source + 4 * _QUAD * j
            s0, s1, s2, s3 = splat(get(at)), splat(get(at + 4)), splat(get(at + 8)), splat(get(at + 12))
            a0, a1, b0, b1 = fma(s0, left, a0), fma(s0, right, a1), fma(s1, left, b0), fma(s1, right, b1)
            d0, d1, e0, e1 = fma(s2, left, d0), fma(s2, right, d1), fma(s3, left, e0), fma(s3, right, e1)
        store(row, a0)
        store(row + 4 * LANES, a1)
        store(row + _PANEL, b0)
        store(row + _PANEL + 4 * LANES, b1)
        store(row + 2 * _PANEL, d0)
        store(row + 2 * _PANEL + 4 * LANES, d1)
        store(row + 3 * _PANEL, e0)
        store(row + 3 * _PANEL + 4 * LANES, e1)


@kernel
def _head(args: int, scratch: int, s: int, head: int) -> None:
    """One head of one sequence, chunk after chunk."""
    x, x_row, dt, dt_row = word(args, 1), word(args, 2), word(args, 3), word(args, 4)
    c, c_row, packed, packed_row = word(args, 5), word(args, 6), word(args, 7), word(args, 8)
    heads, width, groups, size = word(args, 9), word(args, 10), word(args, 11), word(args, 12)
    rates, skip, by_column, bias = word(args, 13), word(args, 14), word(args, 15), word(args, 16)
    plus, low, high, out = word(args, 17), real(args, 18), real(args, 19), word(args, 20)
    products, starts, lengths = word(args, 21), word(args, 22), word(args, 23)
    first, end = slot_at(word(args, 24), s), slot_at(word(args, 24), s + 1)
    if first >= end:
        return
    known = slot_at(word(args, 26), s)
    mine = word(args, 27) + slot_at(word(args, 25), s) * word(args, 28) + 4 * head * width * size
    group = head // (heads // groups)
    rows = (size + _QUAD - 1) // _QUAD * _QUAD
    w = scratch + _VECTORS * _LINE
    xs = w + _Q * _LINE
    ws, h = xs + _Q * _PANEL, xs + 2 * _Q * _PANEL
    if skip:
        skip += 4 * head * (width if by_column else 1)
    rate, offset = get(rates + 4 * head), get(bias + 4 * head) if bias else np.float32(0.0)
    if known:
        for p in range(0, width, _PAIR):
            panel = h + p // _PAIR * rows * _PANEL
            for i in range(0, rows * _PANEL, 4 * LANES):
                store(panel + i, splat(0.0))
            transpose(mine + 4 * p * size, 4 * size, panel, _PANEL, min(_PAIR, width - p), size)
    for chunk in range(first, end):
        t, tokens = slot_at(starts, chunk), slot_at(lengths, chunk)
        shared = chunk * groups + group
        _steps(dt + t * dt_row + 4 * head, dt_row, tokens, offset, plus, low, high, scratch)
        _decays(tokens, rate, scratch)
        _weights(products + shared * _Q * _LINE, tokens, scratch, w)
        for p in range(0, width, _PAIR):
            panel = h + p // _PAIR * rows * _PANEL
            tx, ty = x + t * x_row + 4 * (head * width + p), out + 4 * ((t * heads + head) * width + p)
            _inputs(tx, x_row, tokens, width - p, scratch, xs, ws)
            for i in range(0, tokens, _QUAD):
                _outputs(
                    i, tokens, size, panel, known, c + t * c_row + 4 * group * size, c_row, xs, w, scratch,
                    tx, x_row, ty, 4 * heads * width, skip + 4 * p if by_column else skip, by_column, width - p,
                )  # fmt: skip
            decay = get(scratch + 3 * _LINE + 4 * (tokens - 1))
            _advance(panel, known, decay, packed + shared * packed_row, ws, tokens, size)
        known = 1
    for p in range(0, width, _PAIR):
        panel = h + p // _PAIR * rows * _PANEL
        transpose(panel, _PANEL, mine + 4 * p * size, 4 * size, size, min(_PAIR, width - p))


def _heads_job(args: int, control: int, rank: int) -> None:
    scratch = word(args, 29) + rank * word(args, 30)
    heads = word(args, 9)
    mode = flush_subnormals()
    while True:
        unit = claim(control)
        if unit >= word(args, 0):
            break
        _head(args, scratch, unit // heads, unit % heads)
    restore_mode(mode)


def _pieces(chunks: Chunks, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Starts, lengths and chunks before each sequence: those given, or shorter ones if they are too long."""
    if chunks.size <= _Q:
        return chunks.start.contiguous(), chunks.length.contiguous(), chunks.cu_chunks.contiguous()
    bounds = cu_seqlens.numpy().astype(np.int32)
    lengths = np.diff(bounds)
    counts = -(-lengths // _Q)
    before = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owner = np.repeat(np.arange(len(lengths)), counts)
    inside = (np.arange(before[-1]) - before[owner]) * _Q
    starts = (bounds[owner] + inside).astype(np.int32)
    sizes = np.minimum(_Q, lengths[owner] - inside).astype(np.int32)
    return torch.from_numpy(starts), torch.from_numpy(sizes), torch.from_numpy(before)


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
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.ssm.SSDVarlen`.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    _, heads, width = x.shape
    groups, size = B.shape[1:]
    xs, dts, Bs, Cs = unit_rows(x, "x"), unit_rows(dt, "dt"), unit_rows(B, "B"), unit_rows(C, "C")
    rates = as_float32(A, "A").contiguous()
    skip = None if D is None else as_float32(D, "D").contiguous()
    bias = None if dt_bias is None else as_float32(dt_bias, "dt_bias").contiguous()
    states = plain_states(ssm_state, state_scale, slots, rounding)
    known = has_state.to(torch.int32).contiguous()
    starts, lengths, before = _pieces(chunks, cu_seqlens)
    pieces = starts.shape[0]
    rows = -(-size // _QUAD) * _QUAD
    products = torch.empty(pieces * groups, _Q, _Q)
    packed = torch.empty(pieces * groups, _Q * rows)
    run(
        _groups_job,
        table(
            pieces * groups, groups, size, Bs.data_ptr(), row_bytes(Bs), Cs.data_ptr(), row_bytes(Cs),
            starts.data_ptr(), lengths.data_ptr(), products.data_ptr(), packed.data_ptr(), row_bytes(packed),
        ),
        threads_for(pieces * groups),
    )  # fmt: skip
    out = torch.empty(x.shape, dtype=torch.float32)
    units = slots.shape[0] * heads
    threads = threads_for(units)
    panels = -(-width // _PAIR)
    scratch = torch.empty(threads, (_VECTORS + _Q) * _Q + _PAIR * (panels * rows + 2 * _Q))
    run(
        _heads_job,
        table(
            units, xs.data_ptr(), row_bytes(xs), dts.data_ptr(), row_bytes(dts), Cs.data_ptr(), row_bytes(Cs),
            packed.data_ptr(), row_bytes(packed), heads, width, groups, size, rates.data_ptr(), address(skip),
            int(skip is not None and skip.dim() == 2), address(bias), int(dt_softplus), float(dt_limit[0]),
            float(dt_limit[1]), out.data_ptr(), products.data_ptr(), starts.data_ptr(), lengths.data_ptr(),
            before.data_ptr(), states.slots.data_ptr(), known.data_ptr(), states.rows.data_ptr(),
            row_bytes(states.rows), scratch.data_ptr(), row_bytes(scratch),
        ),
        threads,
    )  # fmt: skip
    states.commit(cu_seqlens)
    return out.to(x.dtype)
