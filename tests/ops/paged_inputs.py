"""Inputs of attention over pages: contexts in shuffled pages among others that hold NaN, and plain attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from inputs import check, error
from torch import Tensor

from recurra.ops.attention import reference


@dataclass(frozen=True)
class Shape:
    """Heads of queries and of keys, widths of keys and values, and how scores are bounded."""

    heads: int = 4
    key_heads: int = 2
    key: int = 16
    value: int = 16
    page: int = 8
    window: int = 0
    softcap: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.key**-0.5, "window": self.window, "softcap": self.softcap}


@dataclass(frozen=True)
class Paged:
    """Queries that are the last ``lengths`` positions of ``contexts``; float64.

    Attributes:
        q: (T, Hq, K); k, v: of every position of every context, (contexts, Hk, K or V).
    """

    shape: Shape
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def draw(cls, shape: Shape, lengths: Sequence[int], contexts: Sequence[int]) -> Paged:
        def normal(*size: int) -> Tensor:
            return torch.randn(*size, dtype=torch.float64)

        tokens = sum(contexts)
        return cls(
            shape,
            tuple(lengths),
            tuple(contexts),
            2 * normal(sum(lengths), shape.heads, shape.key),
            normal(tokens, shape.key_heads, shape.key),
            normal(tokens, shape.key_heads, shape.value),
        )

    def to(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Paged:
        cast = [t.to(device, dtype) for t in (self.q, self.k, self.v)]
        return Paged(self.shape, self.lengths, self.contexts, *cast)

    def only(self, s: int) -> Paged:
        """One sequence."""
        at, q_at = ([0, *accumulate(n)] for n in (self.contexts, self.lengths))
        part, rows = slice(at[s], at[s + 1]), slice(q_at[s], q_at[s + 1])
        lengths, contexts = (self.lengths[s],), (self.contexts[s],)
        return Paged(self.shape, lengths, contexts, self.q[rows], self.k[part], self.v[part])

    def shuffled(self) -> Paged:
        """The same with the numbers of each key in another order: products' sums go another way."""
        order = torch.randperm(self.shape.key, device=self.q.device)
        q, k = (t[..., order].contiguous() for t in (self.q, self.k))
        return Paged(self.shape, self.lengths, self.contexts, q, k, self.v)

    def dense(self, copies: int = 1) -> Tensor:
        """Plain attention in the tensors' own dtype, softmax in float32 at least: (T, Hq, V).

        With ``copies`` each query is computed so often, which changes nothing but the kernels that PyTorch takes.
        """
        at = list(pairwise([0, *accumulate(self.contexts)]))
        parts = []
        for (start, end), q in zip(at, self.q.split(self.lengths), strict=True):
            parts.append(_dense(self.shape, q, self.k[start:end], self.v[start:end], copies))
        return torch.cat(parts)


def check_dense(got: Tensor, case: Paged, what: str) -> None:
    """Hold a result to float64, by the error of plain PyTorch: the worst of a few orders of summing.

    One order may be lucky, and for few queries PyTorch takes a kernel that sums pairwise.
    """
    exact = case.to(torch.float64, case.q.device).dense()
    plain = [case.dense(), *(case.shuffled().dense(copies) for copies in (1, 16))]
    check(got, max(plain, key=lambda y: error(y, exact)), exact, what)


def _dense(shape: Shape, q: Tensor, k: Tensor, v: Tensor, copies: int) -> Tensor:
    groups = shape.heads // shape.key_heads
    k, v = (t.repeat_interleave(groups, 1).transpose(0, 1) for t in (k, v))
    scores = q.transpose(0, 1).repeat_interleave(copies, 1) @ k.transpose(1, 2) * shape.key**-0.5
    if shape.softcap:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    n, context = q.shape[0], k.shape[1]
    behind = torch.arange(context - n, context)[:, None] - torch.arange(context)[None]
    seen = (behind >= 0) & (behind < (shape.window or context))
    wide = torch.promote_types(q.dtype, torch.float32)
    seen = seen.to(q.device).repeat_interleave(copies, 0)
    scores = scores.masked_fill(~seen, -torch.inf).softmax(-1, dtype=wide).to(q.dtype)
    return (scores @ v)[:, ::copies].transpose(0, 1)


@dataclass(frozen=True)
class Cache:
    """What an operator reads: pages in a random order, everything that no context wrote is NaN."""

    k: Tensor
    v: Tensor
    page_table: Tensor
    context_lens: Tensor
    cu_seqlens: Tensor

    def call(self, op: Any, q: Tensor, shape: Shape, lengths: Sequence[int], padding: int = 0) -> Tensor:
        """Prefill, or decode if ``padding`` is not negative: rows of page 0 and context 0 come after."""
        common = {"max_context": int(self.context_lens.max()), **shape.options}
        if padding < 0:
            return op(
                q, self.k, self.v, self.page_table, self.cu_seqlens, self.context_lens,
                max_seqlen=max(lengths), **common,
            )  # fmt: skip
        rows = q.shape[0]
        table, contexts = self.page_table, self.context_lens
        table = torch.cat((table, table.new_zeros(padding, table.shape[1])))
        contexts = torch.cat((contexts, contexts.new_zeros(padding)))
        q = torch.cat((q, q.new_full((padding, *q.shape[1:]), float("nan"))))
        return op(q, self.k, self.v, table, contexts, **common)[:rows]


def fill(case: Paged, store: Any = reference.store_kv, seed: int = 0, spare: int = 3) -> Cache:
    """Store every context with ``store``, in column views of a fused tensor and in two calls."""
    shape, device = case.shape, case.q.device
    counts = [-(-n // shape.page) for n in case.contexts]
    pages = 1 + sum(counts) + spare
    order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
    rows, used = [], 0
    for s, (count, context) in enumerate(zip(counts, case.contexts, strict=True)):
        table[s, :count] = order[used : used + count]
        at = torch.arange(context)
        rows.append(table[s, at // shape.page].long() * shape.page + at % shape.page)
        used += count
    k = torch.full(
        (pages, shape.page, shape.key_heads, shape.key), torch.nan, dtype=case.k.dtype, device=device
    )
    v = torch.full(
        (pages, shape.page, shape.key_heads, shape.value), torch.nan, dtype=case.v.dtype, device=device
    )
    at = torch.cat(rows).to(device)
    wide = torch.cat((case.k.flatten(1), case.v.flatten(1)), 1)
    new_k, new_v = wide.split((shape.key_heads * shape.key, shape.key_heads * shape.value), 1)
    new_k, new_v = (t.unflatten(1, (shape.key_heads, -1)) for t in (new_k, new_v))
    cut = at.shape[0] // 3
    for part in (slice(0, cut), slice(cut, None)):
        store(new_k[part], new_v[part], k, v, at[part])
    bounds = torch.tensor([0, *accumulate(case.lengths)], dtype=torch.int32, device=device)
    contexts = torch.tensor(case.contexts, dtype=torch.int32, device=device)
    return Cache(k, v, table.to(device), contexts, bounds)


def run(op: Any, case: Paged, cache: Cache | None = None, padding: int = -1) -> Tensor:
    """Queries as a column view of a wider tensor whose other columns are NaN."""
    cache = cache or fill(case)
    spare = case.q.new_full((case.q.shape[0], 8), torch.nan)
    wide = torch.cat((spare, case.q.flatten(1), spare), 1)
    q = wide[:, 8:-8].unflatten(1, case.q.shape[1:])
    return cache.call(op, q, case.shape, case.lengths, padding)
