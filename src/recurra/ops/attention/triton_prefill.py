"""Attention of packed pieces of prompts on GPUs: a program takes a block of one sequence's queries of one head
and walks over the keys that they see, once (Dao et al., 2022: "FlashAttention")."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.attention.triton_device import absorb, bounded, rows_of


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["page_table", "cu_seqlens", "context_lens"],
)
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    cu_seqlens,
    context_lens,
    out,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    s = tl.program_id(2)
    h = tl.program_id(1)
    begin = tl.load(cu_seqlens + s)
    length = tl.load(cu_seqlens + s + 1) - begin
    start = tl.program_id(0) * BM
    if start >= length:
        return
    context = tl.load(context_lens + s)
    m = tl.arange(0, BM)
    n = tl.arange(0, BN)
    ki = tl.arange(0, BK)
    vi = tl.arange(0, BV)
    row_ok, k_ok, v_ok = start + m < length, ki < K, vi < V
    row = (begin + start).to(tl.int64) + m
    own = context - length + start + m
    queries = tl.load(
        q + row[:, None] * q_row + h * q_head + ki[None, :], mask=row_ok[:, None] & k_ok[None, :], other=0.0
    )
    table = page_table + s.to(tl.int64) * table_row
    key_head = h // (HEADS // KEY_HEADS)
    last = tl.minimum(context, context - length + start + BM)
    first = 0
    if WINDOWED:
        first = tl.maximum(context - length + start - window + 1, 0) // BN * BN
    most = tl.full((BM,), float("-inf"), tl.float32)
    whole = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BV), tl.float32)
    for i in range((last - first + BN - 1) // BN):
        position = first + i * BN + n
        ok = position < last
        at = rows_of(table, position, ok, PAGE) * KEY_HEADS + key_head
        keys = tl.load(
            k_cache + at[None, :] * K + ki[:, None], mask=ok[None, :] & k_ok[:, None], other=0.0
        ).to(queries.dtype)
        scores = bounded(tl.dot(queries, keys, input_precision=PRECISION), scale, softcap, CAPPED)
        seen = ok[None, :] & (position[None, :] <= own[:, None])
        if WINDOWED:
            seen &= position[None, :] > own[:, None] - window
        scores = tl.where(seen, scores, float("-inf"))
        values = tl.load(
            v_cache + at[:, None] * V + vi[None, :], mask=ok[:, None] & v_ok[None, :], other=0.0
        ).to(queries.dtype)
        most, whole, acc = absorb(scores, values, most, whole, acc, PRECISION)
    y = acc / tl.where(whole > 0.0, whole, 1.0)[:, None]  # rows behind the piece may see nothing
    tl.store(
        out + (row[:, None] * HEADS + h) * V + vi[None, :],
        y.to(out.dtype.element_ty),
        mask=row_ok[:, None] & v_ok[None, :],
    )


def check(q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor) -> None:
    """Assert what the kernels take for granted."""
    assert q.stride(2) == 1, f"q strides {q.stride()}: unit last stride needed"
    assert page_table.stride(1) == 1 or page_table.shape[1] < 2, page_table.stride()
    assert q.shape[1] % k_cache.shape[2] == 0, (q.shape, k_cache.shape)
    page = k_cache.shape[1]
    assert page & (page - 1) == 0, f"pages of {page} tokens: a power of two is needed"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        assert cache.is_contiguous(), f"{name} strides {cache.stride()}"


def attention_varlen(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    *,
    max_seqlen: int,
    max_context: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """See :class:`recurra.ops.attention.AttentionVarlen`."""
    check(q, k_cache, v_cache, page_table)
    tokens, heads, key = q.shape
    _, page, key_heads, value = v_cache.shape
    out = torch.empty((tokens, heads, value), dtype=q.dtype, device=q.device)
    sequences = context_lens.shape[0]
    if tokens == 0 or sequences == 0:
        return out
    exact = q.dtype == torch.float32  # ordinary multiplications, for which smaller tiles compile better
    block = 32 if exact else 64
    with torch.cuda.device_of(q):
        _prefill_kernel[(triton.cdiv(max_seqlen, block), heads, sequences)](
            q, k_cache, v_cache, page_table, cu_seqlens, context_lens, out, float(scale), float(softcap), window,
            q.stride(0), q.stride(1), page_table.stride(0),
            HEADS=heads, KEY_HEADS=key_heads, K=key, V=value, PAGE=page, WINDOWED=window > 0,
            CAPPED=softcap > 0, PRECISION="ieee" if exact else "tf32", BM=block, BN=block,
            BK=max(16, triton.next_power_of_2(key)), BV=max(16, triton.next_power_of_2(value)),
            num_warps=4, num_stages=2,
        )  # fmt: skip
    return out
