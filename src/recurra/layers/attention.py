"""Softmax attention as a mixer: one projection for queries, keys and values, which live in pages.

    q, k, v = qkv(x)           # perhaps normed by head, perhaps turned by position
    out     = o_proj(attend(q, k, v) [* sigmoid(gate)])

Source: "Attention is all you need" (Vaswani et al., 2017); grouped queries: Ainslie et al., 2023.
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
class AttentionSizes:
    """Numbers of one attention layer.

    Attributes:
        hidden: width of the input and output; ``out``: of the output where it is another.
        num_heads, num_kv_heads: query heads, and the key and value heads that they share.
        head_dim: of each.
        scale: of the scores.
        bias: of the projection of queries, keys and values; ``out_bias`` of the other.
        rotary: how positions turn queries and keys; None: no positions.
        norm_eps: of the RMS norms of queries and keys; None: no norms.
        norm_heads: normalise each head by itself; else all heads of queries, and all of keys, together.
        window: positions that a query sees, its own included; 0 is all.
        softcap: bound of the scores; 0 is none.
        gated: queries come with a gate each, whose sigmoid multiplies the heads' outputs.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    bias: bool = False
    out_bias: bool = False
    rotary: RotarySizes | None = None
    norm_eps: float | None = None
    norm_heads: bool = True
    window: int = 0
    softcap: float = 0.0
    gated: bool = False
    out: int | None = None

    @property
    def q_rows(self) -> int:
        """Rows of the query projection, gates included: by head, query then gate."""
        return self.num_heads * self.head_dim * (2 if self.gated else 1)

    @property
    def kv_rows(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def heads(self) -> tuple[int, int, int]:
        """Heads of queries, keys and values."""
        return self.num_heads, self.num_kv_heads, self.num_kv_heads


class Attention(nn.Module):
    """Mixes tokens by attention (see :class:`recurra.layers.base.Mixer`); its state is pages of keys and values.

    Args:
        sizes: its numbers.
        qkv, o_proj: projections shared with another layer; None: its own.
    """

    def __init__(
        self,
        sizes: AttentionSizes,
        *,
        qkv: Linear | None = None,
        o_proj: Linear | None = None,
        ops: Ops,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        rows, inner = sizes.q_rows + 2 * sizes.kv_rows, sizes.num_heads * sizes.head_dim
        self.qkv = qkv or Linear(sizes.hidden, rows, bias=sizes.bias, ops=ops, dtypes=dtypes, device=device)
        self.o_proj = o_proj or Linear(
            inner, sizes.out or sizes.hidden, bias=sizes.out_bias, ops=ops, dtypes=dtypes, device=device
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if sizes.norm_eps is not None:
            one, all_q, all_k = sizes.head_dim, sizes.num_heads * sizes.head_dim, sizes.kv_rows
            q_width, k_width = (one, one) if sizes.norm_heads else (all_q, all_k)
            self.q_norm = RMSNorm(q_width, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device)
            self.k_norm = RMSNorm(k_width, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device)
        self._rotary = None if sizes.rotary is None else Rotary(sizes.rotary, device)

    def state_spec(self) -> KVSpec:
        """Keys and values of one token."""
        s = self.sizes
        return KVSpec(s.num_kv_heads, s.head_dim, s.head_dim, self._dtypes.kv, s.window)

    def prefill(self, x: Tensor, batch: ForwardBatch, state: PagedKV) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); stores their keys and values."""
        first = batch.num_decode
        q, gate = self._store(x, batch.positions[first:], batch.kv_rows[first:], state)
        y = self._ops.attention_varlen(
            q, state.k, state.v, batch.prefill_pages, batch.cu_seqlens, batch.context_lens[first:],
            max_seqlen=batch.max_seqlen, max_context=batch.max_context, scale=self.sizes.scale,
            window=self.sizes.window, softcap=self.sizes.softcap,
        )  # fmt: skip
        return self._project(y, gate)

    def decode(self, x: Tensor, batch: ForwardBatch, state: PagedKV) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); stores its key and value."""
        rows = batch.num_decode
        q, gate = self._store(x, batch.positions[:rows], batch.kv_rows[:rows], state)
        y = self._ops.attention_update(
            q, state.k, state.v, batch.decode_pages, batch.context_lens[:rows], max_context=batch.max_context,
            scale=self.sizes.scale, window=self.sizes.window, softcap=self.sizes.softcap,
        )  # fmt: skip
        return self._project(y, gate)

    def project(self, x: Tensor) -> Tensor:
        """Queries (with their gates), keys and values side by side, (T, all rows)."""
        out: Tensor = self.qkv(x)
        return out

    def _store(
        self, x: Tensor, positions: Tensor, kv_rows: Tensor, state: PagedKV
    ) -> tuple[Tensor, Tensor | None]:
        """Queries (T, heads, dim) and gates likewise; keys and values go to their pages."""
        s = self.sizes
        q, k, v = torch.split(self.project(x), [s.q_rows, s.kv_rows, s.kv_rows], dim=-1)
        tokens, gate = x.shape[0], None
        q, k, v = (t.view(tokens, heads, -1) for t, heads in zip((q, k, v), s.heads, strict=True))
        if s.gated:
            q, gate = torch.split(q, s.head_dim, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = _normed(self.q_norm, q), _normed(self.k_norm, k)
        if self._rotary is not None:
            q, k = self._rotary(positions, q, k)
        self._ops.store_kv(k, v, state.k, state.v, kv_rows)
        return q, gate

    def _project(self, y: Tensor, gate: Tensor | None) -> Tensor:
        if gate is not None:
            y = y * torch.sigmoid(gate)
        out: Tensor = self.o_proj(y.flatten(1))
        return out


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """Norm by head, or all heads together, as wide as the weight is: (T, heads, dim) to the same."""
    normed: Tensor = norm(x.reshape(-1, norm.weight.shape[0]))
    return normed.view(x.shape)
