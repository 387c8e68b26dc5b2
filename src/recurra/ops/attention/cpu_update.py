"""Attention from one new token a sequence on the CPU.

A unit of work is a piece of one sequence's context for one key head: its query heads' scores, their weights as
far as the piece knows them, and the weighted sum of its values. Pieces have fixed bounds, so a row's result
depends neither on the other rows nor on the threads; a second phase joins them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.cpu.calls import row_bytes, run, table, threads_for, unit_rows
from recurra.ops.cpu.jit import address, kernel
from recurra.ops.cpu.maths import exp
from recurra.ops.cpu.matmul import PRODUCT, PRODUCTS, call_product
from recurra.ops.cpu.threads import claim, finish, wait_done
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import (
    BF16,
    F16,
    F32,
    LANES,
    add,
    div,
    fma,
    get,
    load,
    load_bf16,
    load_bf16_first,
    load_f16,
    load_f16_first,
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

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
#: Positions of a piece.
PIECE = 1024
_LOWEST = -3.0e38
_PANEL = 4 * LANES  # columns of values whose sums stay in registers


@kernel
def _stored(kind: int, at: int, count: int) -> Any:
    """Up to 16 stored numbers."""
    if kind == F32:
        return load_some(at, count)
    if kind == BF16:
        return load_bf16(at) if count >= LANES else load_bf16_first(at, count)
    return load_f16(at) if count >= LANES else load_f16_first(at, count)


@kernel
def _capped(x: Any, cap: float) -> Any:
    """cap * tanh(x / cap), for cap > 0: tanh(t) = (1 - e) / (1 + e) with e = exp(-2 |t|).

    Where 2 |t| is small, 1 - e is taken from its series, for it has lost its last digits.
    """
    t = mul(x, splat(2.0 / cap))
    y = where_less(t, splat(0.0), sub(splat(0.0), t), t)
    e = exp(sub(splat(0.0), y))
    series = fma(splat(1.0 / 5040.0), y, splat(-1.0 / 720.0))
    series = fma(series, y, splat(1.0 / 120.0))
    series = fma(series, y, splat(-1.0 / 24.0))
    series = fma(series, y, splat(1.0 / 6.0))
    series = fma(series, y, splat(-0.5))
    series = mul(fma(series, y, splat(1.0)), y)
    size = div(where_less(y, splat(0.5), series, sub(splat(1.0), e)), add(splat(1.0), e))
    size = mul(splat(cap), size)
    return where_less(t, splat(0.0), sub(splat(0.0), size), size)


@kernel
def _largest(scores: int, count: int, scale: float, cap: float, spare: int) -> float:
    """Scale (and cap) scores in place; returns the largest. A NaN is passed over: it shows in the sum."""
    lanes = splat(_LOWEST)
    for t in range(0, count, LANES):
        s = mul(load_some(scores + 4 * t, count - t), splat(scale))
        if cap > 0.0:
            s = _capped(s, cap)
        store_some(scores + 4 * t, s, count - t)
        if count - t >= LANES:
            lanes = where_less(lanes, s, s, lanes)
    store(spare, lanes)
    most = _LOWEST
    for i in range(LANES):
        most = max(most, get(spare + 4 * i))
    for t in range(count // LANES * LANES, count):
        most = max(most, get(scores + 4 * t))
    return most


@kernel
def _weigh(scores: int, count: int, most: float) -> float:
    """Scores to e^(score - most), in place; returns their sum."""
    sums = splat(0.0)
    for t in range(0, count, LANES):
        p = exp(sub(load_some(scores + 4 * t, count - t), splat(most)))
        store_some(scores + 4 * t, p, count - t)
        sums = add(sums, load_some(scores + 4 * t, count - t))
    whole: float = total(sums)
    return whole


@kernel
def _panel(kind: int, v: int, v_bytes: int, p: int, count: int, y: int, keep: float) -> None:
    """64 columns: ``y = keep * y + sum_t p[t] v[t]``."""
    size = 4 if kind == F32 else 2
    by, step = splat(keep), LANES * size
    y0, y1, y2, y3 = mul(by, load(y)), mul(by, load(y + 64)), mul(by, load(y + 128)), mul(by, load(y + 192))
    for t in range(count):
        at, w = v + t * v_bytes, splat(get(p + 4 * t))
        y0 = fma(w, _stored(kind, at, LANES), y0)
        y1 = fma(w, _stored(kind, at + step, LANES), y1)
        y2 = fma(w, _stored(kind, at + 2 * step, LANES), y2)
        y3 = fma(w, _stored(kind, at + 3 * step, LANES), y3)
    store(y, y0)
    store(y + 64, y1)
    store(y + 128, y2)
    store(y + 192, y3)


@kernel
def _column(kind: int, v: int, v_bytes: int, p: int, count: int, y: int, keep: float, some: int) -> None:
    """Up to 16 columns, likewise."""
    acc = mul(splat(keep), load_some(y, some))
    for t in range(count):
        acc = fma(splat(get(p + 4 * t)), _stored(kind, v + t * v_bytes, some), acc)
    store_some(y, acc, some)


@kernel
def _values(kind: int, v: int, v_bytes: int, p: int, count: int, y: int, keep: float, values: int) -> None:
    """All columns."""
    size, c = 4 if kind == F32 else 2, 0
    while values - c >= _PANEL:
        _panel(kind, v + c * size, v_bytes, p, count, y + 4 * c, keep)
        c += _PANEL
    while c < values:
        _column(kind, v + c * size, v_bytes, p, count, y + 4 * c, keep, values - c)
        c += LANES


@kernel
def _exp_of(x: float) -> float:
    alike: float = total(exp(splat(x)))
    return alike * (1.0 / LANES)


@kernel
def _piece(args: int, row: int, head: int, first: int, last: int, part: int, scratch: int) -> None:
    """Positions ``first`` to ``last - 1``: into ``part``, for each query head its largest score, the sum of its
    weights, and the weighted sum of values."""
    groups, keys, values, page = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    kind, pages = word(args, 6), word(args, 7) + row * word(args, 8)
    q = word(args, 10) + row * word(args, 11) + 4 * head * groups * keys
    size = 4 if kind == F32 else 2
    k_bytes, v_bytes = word(args, 13), word(args, 15)  # from one position to the next
    width = 4 * (values + 2)
    scale, cap = real(args, 16), real(args, 17)
    widened = scratch + 4 * groups * page  # for the product, then 16 numbers for the largest score
    spare = widened + 32 * keys
    for g in range(groups):
        at = part + g * width
        put(at, _LOWEST)
        put(at + 4, 0.0)
        for c in range(0, values, LANES):
            store_some(at + 8 + 4 * c, splat(0.0), values - c)
    position = first
    while position < last:
        place = position % page
        count = min(page - place, last - position)
        at = slot_at(pages, position // page) * page + place
        k = word(args, 12) + at * k_bytes + head * keys * size
        v = word(args, 14) + at * v_bytes + head * values * size
        call_product(
            word(args, 18), k, k_bytes, count, q, 4 * keys, groups, keys, scratch, 4 * page, widened, v, 0,
        )  # fmt: skip
        for g in range(groups):
            at, scores = part + g * width, scratch + 4 * g * page
            before = get(at)
            most = max(before, _largest(scores, count, scale, cap, spare))
            keep = _exp_of(before - most)
            put(at, most)
            put(at + 4, get(at + 4) * keep + _weigh(scores, count, most))
            _values(kind, v, v_bytes, scores, count, at + 8, keep, values)
        position += count


@kernel
def _join(part: int, pieces: int, piece_bytes: int, y: int, values: int) -> None:
    """One query head's output from all its pieces."""
    most, whole = get(part), np.float32(0.0)
    for i in range(1, pieces):
        most = max(most, get(part + i * piece_bytes))
    for c in range(0, values, LANES):
        store_some(y + 4 * c, splat(0.0), values - c)
    for i in range(pieces):
        at = part + i * piece_bytes
        keep = _exp_of(get(at) - most)
        whole += keep * get(at + 4)
        for c in range(0, values, LANES):
            acc = fma(splat(keep), load_some(at + 8 + 4 * c, values - c), load_some(y + 4 * c, values - c))
            store_some(y + 4 * c, acc, values - c)
    for c in range(0, values, LANES):
        store_some(y + 4 * c, div(load_some(y + 4 * c, values - c), splat(whole)), values - c)


def _job(args: int, control: int, rank: int) -> None:
    """0 rows, 1 key heads, 2 query heads of each, 3 K, 4 V, 5 page size, 6 kind, 7 page table, 8 its row's bytes,
    9 contexts, 10 q, 11 its row's bytes, 12 keys, 13 bytes of a position, 14 values, 15 likewise, 16 scale,
    17 cap, 18 product, 19 window, 20 pieces of a row, 21 parts, 22 out, 23 scratch, 24 its bytes a thread,
    25 positions of a piece."""
    heads, groups, values, pieces = word(args, 1), word(args, 2), word(args, 4), word(args, 20)
    units = word(args, 0) * heads
    chunks, span, window = units * pieces, word(args, 25), word(args, 19)
    part_bytes = groups * 4 * (values + 2)
    scratch = word(args, 23) + rank * word(args, 24)
    ticket = claim(control)
    while ticket < chunks:
        unit, i = ticket // pieces, ticket % pieces
        context = slot_at(word(args, 9), unit // heads)
        low = max(0, context - window) if window else 0
        first = max(low // span * span + i * span, low)
        last = min(context, (low // span + i + 1) * span)
        if first < last:
            part = word(args, 21) + ticket * part_bytes
            _piece(args, unit // heads, unit % heads, first, last, part, scratch)
        ticket = finish(control)
    wait_done(control, chunks)
    while ticket < chunks + units:
        unit = ticket - chunks
        context = slot_at(word(args, 9), unit // heads)
        low = max(0, context - window) if window else 0
        used = (context + span - 1) // span - low // span if context else 0
        for g in range(groups):
            part = word(args, 21) + unit * pieces * part_bytes + g * 4 * (values + 2)
            y = word(args, 22) + 4 * (unit * groups + g) * values
            if used:
                _join(part, used, part_bytes, y, values)
            else:
                for c in range(0, values, LANES):
                    store_some(y + 4 * c, splat(0.0), values - c)
        ticket = finish(control)


def attention_update(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    *,
    max_context: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """See :class:`recurra.ops.attention.AttentionUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: keys and values in a dtype that no kernel widens.
    """
    rows, heads, keys = q.shape
    _, page, key_heads, values = v_cache.shape
    if k_cache.dtype not in KINDS:
        raise ConfigError(
            "dtype", str(k_cache.dtype), "the cpu backend can't read keys and values in this dtype.",
            'Use "float32", "bfloat16" or "float16", or backend="reference".',
        )  # fmt: skip
    assert k_cache.dtype == v_cache.dtype, (k_cache.dtype, v_cache.dtype)
    assert heads % key_heads == 0, (q.shape, k_cache.shape)
    assert k_cache.is_contiguous(), k_cache.stride()
    assert v_cache.is_contiguous(), v_cache.stride()
    groups, kind = heads // key_heads, KINDS[k_cache.dtype]
    queries = unit_rows(q, "q")
    pages, contexts = page_table.to(torch.int32).contiguous(), context_lens.to(torch.int32).contiguous()
    reach = min(max_context, window + PIECE) if window else max_context
    pieces = max(1, -(-reach // PIECE))
    units = rows * key_heads
    threads = threads_for(units * pieces)
    out = torch.empty((rows, heads, values), dtype=torch.float32)
    parts = np.empty(units * pieces * groups * (values + 2), dtype=np.float32)
    scratch = np.empty((threads, groups * page + 8 * keys + LANES), dtype=np.float32)
    arguments = table(
        rows, key_heads, groups, keys, values, page, kind, pages.data_ptr(), row_bytes(pages),
        contexts.data_ptr(), queries.data_ptr(), row_bytes(queries), k_cache.data_ptr(),
        k_cache.stride(1) * k_cache.element_size(), v_cache.data_ptr(),
        v_cache.stride(1) * v_cache.element_size(), float(scale), float(softcap),
        address(PRODUCTS[kind], PRODUCT), window, pieces, parts.ctypes.data, out.data_ptr(),
        scratch.ctypes.data, scratch.strides[0], PIECE,
    )  # fmt: skip
    run(_job, arguments, threads)
    return out.to(q.dtype)
