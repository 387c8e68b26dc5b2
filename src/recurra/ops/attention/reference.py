"""The definition of attention over pages, a sequence at a time. Float32, or float64 if given it."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from recurra.ops.precision import wide


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_rows: Tensor) -> None:
    """See :class:`recurra.ops.attention.StoreKV`."""
    k_cache.flatten(0, 1)[kv_rows] = k.to(k_cache.dtype)
    v_cache.flatten(0, 1)[kv_rows] = v.to(v_cache.dtype)


def gather(cache: Tensor, pages: Tensor, count: int) -> Tensor:
    """The first ``count`` positions of a sequence, (count, Hk, dim)."""
    size = cache.shape[1]
    return cache[pages[: -(-count // size)].long()].flatten(0, 1)[:count]


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float) -> Tensor:
    """Queries (n, Hq, K) that are the last n positions of keys (context, Hk, K) and values (context, Hk, V)."""
    n, heads, _ = q.shape
    context, groups = k.shape[0], heads // k.shape[1]
    dtype = wide(q, k)
    k, v = (t.to(dtype).repeat_interleave(groups, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.to(dtype), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    own = torch.arange(context - n, context, device=q.device)[:, None]
    position = torch.arange(context, device=q.device)[None, :]
    hidden = position > own
    if window:
        hidden |= position <= own - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)


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
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    for s, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        count = int(context_lens[s])
        k, v = (gather(cache, page_table[s], count) for cache in (k_cache, v_cache))
        if end > start:
            out[start:end] = attend(q[start:end], k, v, scale=scale, window=window, softcap=softcap)
    return out


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
    """See :class:`recurra.ops.attention.AttentionUpdate`."""
    out = q.new_zeros(*q.shape[:2], v_cache.shape[-1])
    for row, count in enumerate(context_lens.tolist()):
        if count:
            k, v = (gather(cache, page_table[row], count) for cache in (k_cache, v_cache))
            out[row] = attend(q[row : row + 1], k, v, scale=scale, window=window, softcap=softcap)[0]
    return out
