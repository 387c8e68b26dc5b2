"""Attention from one new token a sequence on GPUs, in two kernels.

1. parts: a program takes a part of one sequence's context for one key head, all its query heads at once.
2. join: a program joins the parts of one query head.

How a context is cut depends on its own length alone, and the grid on nothing that changes from step to step: a
row's result doesn't depend on the other rows, and a captured graph serves every length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.attention.triton_device import absorb, bounded, rows_of
from recurra.ops.attention.triton_prefill import check

#: Most parts of a context, and the fewest positions of one.
_PARTS = 32
_LEAST = 256


@triton.jit
def _cut(context, window, PARTS: tl.constexpr, LEAST: tl.constexpr, BN: tl.constexpr, WINDOWED: tl.constexpr):
    """First position that is seen, and positions of a part."""
    first = context * 0
    if WINDOWED:
        first = tl.maximum(context - window, 0)
    share = (context - first + PARTS - 1) // PARTS
    return first, tl.maximum((share + BN - 1) // BN * BN, LEAST)


@triton.jit(do_not_specialize=["table_row"], do_not_specialize_on_alignment=["page_table", "context_lens"])
def _parts_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    context_lens,
    sums,
    bests,
    totals,
    scale,
    softcap,
    window,
    q_row,
    q_head,
    table_row,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    groups: tl.constexpr = HEADS // KEY_HEADS
    part = tl.program_id(0)
    key_head = tl.program_id(1)
    r = tl.program_id(2).to(tl.int64)
    context = tl.load(context_lens + r)
    low, size = _cut(context, window, PARTS, LEAST, BN, WINDOWED)
    first = low + part * size
    if first >= context:
        return
    last = tl.minimum(first + size, context)
    g = tl.arange(0, BG)
    n = tl.arange(0, BN)
    ki = tl.arange(0, BK)
    vi = tl.arange(0, BV)
    g_ok, k_ok, v_ok = g < groups, ki < K, vi < V
    h = key_head * groups + g
    queries = tl.load(
        q + r * q_row + h[:, None] * q_head + ki[None, :], mask=g_ok[:, None] & k_ok[None, :], other=0.0
    )
    table = page_table + r * table_row
    most = tl.full((BG,), float("-inf"), tl.float32)
    whole = tl.zeros((BG,), tl.float32)
    acc = tl.zeros((BG, BV), tl.float32)
    for i in range((last - first + BN - 1) // BN):
        position = first + i * BN + n
        ok = position < last
        at = rows_of(table, position, ok, PAGE) * KEY_HEADS + key_head
        keys = tl.load(
            k_cache + at[None, :] * K + ki[:, None], mask=ok[None, :] & k_ok[:, None], other=0.0
        ).to(queries.dtype)
        values = tl.load(
            v_cache + at[:, None] * V + vi[None, :], mask=ok[:, None] & v_ok[None, :], other=0.0
        ).to(queries.dtype)
        scores = bounded(tl.dot(queries, keys, input_precision=PRECISION), scale, softcap, CAPPED)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        most, whole, acc = absorb(scores, values, most, whole, acc, PRECISION)
    place = (r * HEADS + h) * PARTS + part
    tl.store(bests + place, most, mask=g_ok)
    tl.store(totals + place, whole, mask=g_ok)
    tl.store(sums + place[:, None] * V + vi[None, :], acc, mask=g_ok[:, None] & v_ok[None, :])


@triton.jit(do_not_specialize_on_alignment=["context_lens"])
def _join_kernel(
    sums,
    bests,
    totals,
    context_lens,
    out,
    window,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    WINDOWED: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    BN: tl.constexpr,
    BV: tl.constexpr,
):
    r = tl.program_id(1).to(tl.int64)
    head = r * HEADS + tl.program_id(0)
    context = tl.load(context_lens + r)
    low, size = _cut(context, window, PARTS, LEAST, BN, WINDOWED)
    vi = tl.arange(0, BV)
    v_ok = vi < V
    most = tl.full((), float("-inf"), tl.float32)
    whole = tl.zeros((), tl.float32)
    acc = tl.zeros((BV,), tl.float32)
    for i in range((context - low + size - 1) // size):
        place = head * PARTS + i
        best = tl.load(bests + place)
        found = tl.maximum(most, best)
        keep, share = tl.exp(most - found), tl.exp(best - found)
        whole = whole * keep + share * tl.load(totals + place)
        acc = acc * keep + share * tl.load(sums + place * V + vi, mask=v_ok, other=0.0)
        most = found
    y = acc / tl.where(context > 0, whole, 1.0)
    tl.store(out + head * V + vi, y.to(out.dtype.element_ty), mask=v_ok)


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
    """See :class:`recurra.ops.attention.AttentionUpdate`. The output of padding rows is zero."""
    check(q, k_cache, v_cache, page_table)
    rows, heads, key = q.shape
    _, page, key_heads, value = v_cache.shape
    out = torch.empty((rows, heads, value), dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    exact = q.dtype == torch.float32
    block = 32 if exact else 64
    parts = max(1, min(_PARTS, triton.cdiv(max_context, _LEAST)))  # no context has more
    sums = torch.empty((rows, heads, _PARTS, value), dtype=torch.float32, device=q.device)
    bests, totals = torch.empty((2, rows, heads, _PARTS), dtype=torch.float32, device=q.device)
    common = {
        "HEADS": heads, "V": value, "WINDOWED": window > 0, "PARTS": _PARTS, "LEAST": _LEAST, "BN": block,
        "BV": max(16, triton.next_power_of_2(value)), "num_warps": 4,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        _parts_kernel[(parts, key_heads, rows)](
            q, k_cache, v_cache, page_table, context_lens, sums, bests, totals, float(scale), float(softcap),
            window, q.stride(0), q.stride(1), page_table.stride(0),
            KEY_HEADS=key_heads, K=key, PAGE=page, CAPPED=softcap > 0, PRECISION="ieee" if exact else "tf32",
            BG=max(16, triton.next_power_of_2(heads // key_heads)), BK=max(16, triton.next_power_of_2(key)),
            num_stages=2, **common,
        )  # fmt: skip
        _join_kernel[(heads, rows)](sums, bests, totals, context_lens, out, window, **common)
    return out
