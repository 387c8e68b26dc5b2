"""Attention of packed pieces of prompts in plain PyTorch: a sequence at a time, a block of queries at a time.

Scores of a block are one batched product over the key heads, whose query heads are stacked as rows. As fast as
PyTorch's own fused attention on a CPU, and unlike that one it knows windows, caps, prefixes and values of
another width than the keys (docs/decisions/0005-attention-over-pages.md).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

#: Scores that a block of queries may have: they should stay in a core's second-level cache.
_SCORES = 1 << 20
_LEAST, _MOST = 16, 128  # queries of a block


def span(cache: Tensor, pages: Tensor, first: int, last: int) -> Tensor:
    """Positions ``first`` to ``last - 1`` of a sequence, (heads, positions, dim) float32."""
    size = cache.shape[1]
    begin = first // size
    taken = cache[pages[begin : -(-last // size)].long()].flatten(0, 1)
    return taken[first - begin * size : last - begin * size].transpose(0, 1).float()


def first_seen(position: int, window: int) -> int:
    """The first position that a query at ``position`` sees."""
    return max(0, position - window + 1) if window else 0


def attend(
    q: Tensor, k: Tensor, v: Tensor, first: int, *, scale: float, window: int, softcap: float
) -> Tensor:
    """Queries (n, Hq, K) at the last n positions of keys (Hk, positions, K) and values (Hk, positions, V).

    Args:
        first: position of the first key and value.

    Returns:
        (n, Hq, V) float32.
    """
    (n, heads, dim), (groups, count) = q.shape, k.shape[:2]
    stacked = (q.float() * scale).view(n, groups, heads // groups, dim).permute(1, 2, 0, 3).contiguous()
    out = q.new_empty((n, heads, v.shape[2]), dtype=torch.float32)
    step = max(_LEAST, min(_MOST, _SCORES // (heads * count)))
    for a in range(0, n, step):
        b = min(n, a + step)
        own = first + count - n + a  # position of the block's first query
        low, high = first_seen(own, window) - first, count - n + b
        rows = stacked[:, :, a:b].reshape(groups, -1, dim)
        scores = torch.bmm(rows, k[:, low:high].transpose(1, 2))
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.view(heads, b - a, high - low)
        hide(scores, own - first - low, window)
        weights = scores.softmax(-1).view(groups, -1, high - low)
        y = torch.bmm(weights, v[:, low:high])
        out[a:b] = y.view(heads, b - a, -1).transpose(0, 1)
    return out


def hide(scores: Tensor, own: int, window: int) -> None:
    """Set scores (heads, queries, keys) of unseen positions to -infinity, in place.

    Query 0 is at key ``own``, query i at ``own + i``; the last key is the last query's.
    """
    rows, keys = scores.shape[1:]
    at = torch.arange(rows, device=scores.device)[:, None]
    later = torch.arange(keys - own, device=scores.device)
    scores[:, :, own:].masked_fill_(later > at, -torch.inf)
    if window:
        key = torch.arange(keys, device=scores.device)
        scores.masked_fill_(key <= own + at - window, -torch.inf)


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
    """See :class:`recurra.ops.attention.AttentionVarlen`. A sequence's result doesn't depend on the others."""
    out = torch.empty((*q.shape[:2], v_cache.shape[3]), dtype=q.dtype, device=q.device)
    contexts = context_lens.tolist()
    for s, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if end == start:
            continue
        first = first_seen(contexts[s] - (end - start), window)
        k, v = (span(cache, page_table[s], first, contexts[s]) for cache in (k_cache, v_cache))
        out[start:end] = attend(q[start:end], k, v, first, scale=scale, window=window, softcap=softcap)
    return out
