"""Latent attention: keys and values of all heads grow out of one short vector a token, beside a key that heads share.

    q          = q_proj(x)                          # or q_up(norm(q_down(x)))
    c, shared  = kv_down(x)
    k, v       = kv_up(norm(c))                     # by head
    out        = o_proj(attend([q, q'], [k, shared], v) [* sigmoid(gate(x))])

q' and the shared key may turn by position, k never does. What is kept is keys and values as heads see them, K and V of
unequal width. Source: DeepSeek-V2 (DeepSeek-AI, 2024), section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.cache.spec import KVSpec, PagedKV
from recurra.layers.dtypes import Dtypes
from recurra.layers.linear import Linear
from recurra.layers.norm import RMSNorm
from recurra.layers.rotary import Rotary, RotarySizes
from recurra.ops import Ops
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Numbers of one latent attention layer.

    Attributes:
        hidden: width of input and output.
        num_heads: of queries, keys and values alike.
        own_dim, shared_dim: values of a key that are a head's own, and that all heads share.
        value_dim: of a value.
        rank: of the vector that keys and values grow out of; ``query_rank`` of the one for queries, 0 without.
        scale: of the scores.
        norm_eps: of the norms of these vectors.
        bias: of ``q_down``, ``kv_down`` and ``o_proj``.
        rotary: how positions turn the shared key and its part of the queries; None: no positions.
        gated: one gate a head, whose sigmoid multiplies its output.
    """

    hidden: int
    num_heads: int
    own_dim: int
    shared_dim: int
    value_dim: int
    rank: int
    scale: float
    norm_eps: float
    query_rank: int = 0
    bias: bool = False
    rotary: RotarySizes | None = None
    gated: bool = False

    @property
    def key_dim(self) -> int:
        """K, of a query and a key."""
        return self.own_dim + self.shared_dim


class LatentAttention(nn.Module):
    """Mixes tokens by attention (see :class:`recurra.layers.base.Mixer`); its state is pages of keys and values."""

    def __init__(self, sizes: LatentSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        heads = sizes.num_heads

        def linear(inner: int, outer: int, bias: bool = False) -> Linear:
            return Linear(inner, outer, bias=bias, ops=ops, dtypes=dtypes, device=device)

        def norm(width: int) -> RMSNorm:
            return RMSNorm(width, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device)

        rank = sizes.query_rank
        self.q_down = linear(sizes.hidden, rank, sizes.bias) if rank else None
        self.q_norm = norm(rank) if rank else None
        self.q_proj = linear(rank or sizes.hidden, heads * sizes.key_dim)
        self.kv_down = linear(sizes.hidden, sizes.rank + sizes.shared_dim, sizes.bias)
        self.kv_norm = norm(sizes.rank)
        self.kv_up = linear(sizes.rank, heads * (sizes.own_dim + sizes.value_dim))
        self.o_proj = linear(heads * sizes.value_dim, sizes.hidden, sizes.bias)
        self.gate = linear(sizes.hidden, heads) if sizes.gated else None
        self._rotary = None if sizes.rotary is None else Rotary(sizes.rotary, device)

    def state_spec(self) -> KVSpec:
        """Keys and values of one token."""
        s = self.sizes
        return KVSpec(s.num_heads, s.key_dim, s.value_dim, self._dtypes.kv)

    def prefill(self, x: Tensor, batch: ForwardBatch, state: PagedKV) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); stores their keys and values."""
        first = batch.num_decode
        q = self._store(x, batch.positions[first:], batch.kv_rows[first:], state)
        y = self._ops.attention_varlen(
            q, state.k, state.v, batch.prefill_pages, batch.cu_seqlens, batch.context_lens[first:],
            max_seqlen=batch.max_seqlen, max_context=batch.max_context, scale=self.sizes.scale,
        )  # fmt: skip
        return self._project(x, y)

    def decode(self, x: Tensor, batch: ForwardBatch, state: PagedKV) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); stores its key and value."""
        rows = batch.num_decode
        q = self._store(x, batch.positions[:rows], batch.kv_rows[:rows], state)
        y = self._ops.attention_update(
            q, state.k, state.v, batch.decode_pages, batch.context_lens[:rows], max_context=batch.max_context,
            scale=self.sizes.scale,
        )  # fmt: skip
        return self._project(x, y)

    def _store(self, x: Tensor, positions: Tensor, kv_rows: Tensor, state: PagedKV) -> Tensor:
        """Queries (T, heads, K); keys and values go to their pages."""
        s, tokens = self.sizes, x.shape[0]
        q = self._queries(x).view(tokens, s.num_heads, s.key_dim)
        latent, shared = torch.split(self.kv_down(x), [s.rank, s.shared_dim], dim=-1)
        shared = shared[:, None, :]
        if self._rotary is not None:
            own, turning = torch.split(q, [s.own_dim, s.shared_dim], dim=-1)
            turned, shared = self._rotary(positions, turning, shared)
            q = torch.cat((own, turned), dim=-1)
        grown = self.kv_up(self.kv_norm(latent)).view(tokens, s.num_heads, s.own_dim + s.value_dim)
        k, v = torch.split(grown, [s.own_dim, s.value_dim], dim=-1)
        k = torch.cat((k, shared.expand(-1, s.num_heads, -1)), dim=-1)
        self._ops.store_kv(k, v, state.k, state.v, kv_rows)
        return q

    def _queries(self, x: Tensor) -> Tensor:
        if self.q_down is not None and self.q_norm is not None:
            x = self.q_norm(self.q_down(x))
        out: Tensor = self.q_proj(x)
        return out

    def _project(self, x: Tensor, y: Tensor) -> Tensor:
        if self.gate is not None:
            y = y * torch.sigmoid(self.gate(x))[..., None]
        out: Tensor = self.o_proj(y.flatten(1))
        return out
