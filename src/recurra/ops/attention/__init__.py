"""Softmax attention over keys and values in pages.

``y[t, h] = sum_j softmax_j(cap(scale * q[t, h] . k[j, g])) v[j, g]`` over the positions j of the query's own
sequence up to its own position, the last ``window`` of them where there is a window; ``g = h // (Hq // Hk)`` is
the key head of query head h, and ``cap(s) = softcap * tanh(s / softcap)`` where there is a cap. Sources:
"Attention is all you need" (Vaswani et al., 2017); GQA (Ainslie et al., 2023); paged keys and values (Kwon et
al., 2023).

The keys and values of a step's tokens are stored before anything attends. The page table says where a
sequence's positions are: position p is row ``p % page_size`` of page ``page_table[s, p // page_size]``. Page 0 is
scratch: it stands in a table only behind a sequence's last page, or in rows of padding, whose output is
undefined and whose context is 0.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class StoreKV(Protocol):
    """Write keys and values to their places.

    Args:
        k: (T, Hk, K), v: (T, Hk, V), any token stride; float32, bfloat16, float16 (float64 in the reference).
        k_cache: (pages, page size, Hk, K), **written in place**; v_cache: (pages, page size, Hk, V), likewise.
            Their dtype may be narrower.
        kv_rows: (T,) int64, page * page size + row; row numbers of padding lie in page 0.
    """

    def __call__(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, kv_rows: Tensor) -> None: ...


class AttentionVarlen(Protocol):
    """Attend from packed pieces of prompts to everything before them and to themselves.

    Args:
        q: (T, Hq, K), any token stride.
        k_cache, v_cache: as in :class:`StoreKV`; Hk divides Hq.
        page_table: (S, pages) int32.
        cu_seqlens: (S + 1,) int32, bounds of the pieces in q. Query t of a piece of n tokens is at position
            ``context_lens[s] - n + t``.
        context_lens: (S,) int32, tokens of the sequence up to the piece's end.
        max_seqlen, max_context: the longest piece and context.
        scale: of the scores.
        window: positions seen, the query's own included; 0 is all.
        softcap: bound of the scores; 0 is none.

    Returns:
        (T, Hq, V) in q's dtype.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...


class AttentionUpdate(Protocol):
    """Attend from one new token of each sequence.

    Args:
        q: (R, Hq, K), any row stride.
        page_table: (R, pages) int32; context_lens: (R,) int32, the new token included; 0 in padding rows.
        others: as in :class:`AttentionVarlen`.

    Returns:
        (R, Hq, V) in q's dtype.
    """

    def __call__(
        self,
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
    ) -> Tensor: ...
