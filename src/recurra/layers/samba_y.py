"""SambaY's parts: differential attention, with keys of its own or another layer's, and memory that layers share.

Differential attention splits query heads, and key heads likewise, into even and odd ones, and takes the odd ones'
attention as noise: with V the values of both key heads of a pair side by side,

    y   = attend(q_even, k_even, V) - lambda * attend(q_odd, k_odd, V)
    out = out_proj((1 - lambda_init) * norm(y)),    lambda = exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init

Sources: Differential Transformer (Ye et al., 2024); SambaY (Ren et al., 2025): gated memory units and a decoder whose
second half keeps no keys of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, KVSpec, PagedKV
from recurra.layers.dtypes import Dtypes, parameter
from recurra.layers.linear import Linear
from recurra.layers.mamba1 import MambaMixer
from recurra.layers.norm import RMSNorm
from recurra.ops import Ops
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class DiffAttentionSizes:
    """Numbers of one layer; heads and key heads are even.

    Attributes:
        layer: its number, from 0; later layers subtract more.
        window: positions that a query sees, its own included; 0 is all.
        own_keys: False: it attends to the keys and values of another layer.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    layer: int
    window: int = 0
    own_keys: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.num_heads

    @property
    def lambda_init(self) -> float:
        """Equation 3 of the Differential Transformer, with layers counted from 0."""
        return 0.8 - 0.6 * math.exp(-0.3 * self.layer)


class DiffAttention(nn.Module):
    """Mixes tokens by differential attention (see :class:`recurra.layers.base.Mixer`).

    Both halves go through one attention: the key head of either half has the pair's values, 2 dims wide.
    """

    def __init__(self, sizes: DiffAttentionSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        dim, hidden = sizes.head_dim, sizes.hidden
        self._rows = [hidden, *[sizes.num_kv_heads * dim if sizes.own_keys else 0] * 2]
        self.qkv = Linear(hidden, sum(self._rows), bias=True, ops=ops, dtypes=dtypes, device=device)
        self.o_proj = Linear(hidden, hidden, bias=True, ops=ops, dtypes=dtypes, device=device)
        self.subln = RMSNorm(2 * dim, 1e-5, ops=ops, dtypes=dtypes, device=device)
        self.lambdas = parameter(4, dim, dtype=dtypes.recurrence, device=device)  # q1, k1, q2, k2

    def state_spec(self) -> KVSpec:
        """Keys of one token, and for each of them the values of its pair."""
        s = self.sizes
        return KVSpec(s.num_kv_heads, s.head_dim, 2 * s.head_dim, self._dtypes.kv, s.window)

    def prefill(self, x: Tensor, batch: ForwardBatch, state: PagedKV) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); stores their keys and values if they are its own."""
        first, s = batch.num_decode, self.sizes
        y = self._ops.attention_varlen(
            self._store(x, batch.kv_rows[first:], state), state.k, state.v, batch.prefill_pages,
            batch.cu_seqlens, batch.context_lens[first:], max_seqlen=batch.max_seqlen,
            max_context=batch.max_context, scale=s.head_dim**-0.5, window=s.window,
        )  # fmt: skip
        return self._subtract(y)

    def decode(self, x: Tensor, batch: ForwardBatch, state: PagedKV) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden)."""
        rows, s = batch.num_decode, self.sizes
        y = self._ops.attention_update(
            self._store(x, batch.kv_rows[:rows], state), state.k, state.v, batch.decode_pages,
            batch.context_lens[:rows], max_context=batch.max_context, scale=s.head_dim**-0.5, window=s.window,
        )  # fmt: skip
        return self._subtract(y)

    def _store(self, x: Tensor, kv_rows: Tensor, state: PagedKV) -> Tensor:
        """Queries (T, heads, dim), those of one key head together; keys and values go to their pages."""
        s, tokens = self.sizes, x.shape[0]
        q, k, v = torch.split(self.qkv(x), self._rows, dim=-1)
        if s.own_keys:
            keys = k.view(tokens, s.num_kv_heads, s.head_dim)
            pairs = v.view(tokens, s.num_kv_heads // 2, 1, 2 * s.head_dim).expand(-1, -1, 2, -1)
            self._ops.store_kv(keys, pairs.reshape(tokens, s.num_kv_heads, -1), state.k, state.v, kv_rows)
        by_pair = q.view(tokens, s.num_kv_heads // 2, -1, 2, s.head_dim).transpose(2, 3)
        return by_pair.reshape(tokens, s.num_heads, s.head_dim)

    def _subtract(self, y: Tensor) -> Tensor:
        """From (T, heads, 2 dim) in the order of the key heads to the output (T, hidden)."""
        s, tokens = self.sizes, y.shape[0]
        even, odd = y.view(tokens, s.num_kv_heads // 2, 2, -1, 2 * s.head_dim).unbind(2)
        q1, k1, q2, k2 = self.lambdas
        weight = torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + s.lambda_init
        difference = even - weight.to(y.dtype) * odd
        normed = self.subln(difference.reshape(-1, 2 * s.head_dim)) * (1 - s.lambda_init)
        out: Tensor = self.o_proj(normed.view(tokens, -1))
        return out


class MemoryMamba(MambaMixer):
    """A Mamba layer before its gate: gives the scan's output and the gate's input side by side, (T, 2 channels)."""

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        u, z = self.in_proj(x).chunk(2, dim=-1)
        where = (batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks)
        conv = self.conv1d
        u = self._ops.causal_conv1d_varlen(u, conv.weight, conv.bias, state.conv, *where, silu=True)
        dt, B, C = self._select(u)
        y = self._ops.selective_scan_varlen(
            u, dt, self.A, B, C, self.D, None, self.dt_bias, state.ssm, *where, state_scale=state.scale,
            rounding=state.rounding,
        )  # fmt: skip
        return torch.cat((y, z), dim=-1)

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        u, z = self.in_proj(x).chunk(2, dim=-1)
        slots, conv = batch.decode_slots, self.conv1d
        u = self._ops.causal_conv1d_update(u, conv.weight, conv.bias, state.conv, slots, silu=True)
        dt, B, C = self._select(u)
        y = self._ops.selective_state_update(
            state.ssm, u, dt, self.A, B, C, self.D, None, self.dt_bias, slots, state_scale=state.scale,
            rounding=state.rounding,
        )  # fmt: skip
        return torch.cat((y, z), dim=-1)

    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        """What the layer adds to the residual stream."""
        out: Tensor = self.out_proj(y * F.silu(z))
        return out


class GatedMemory(nn.Module):
    """``out_proj(memory * silu(in_proj(x)))``: (T, hidden), with another layer's (T, channels), to (T, hidden)."""

    def __init__(
        self, hidden: int, channels: int, *, bias: bool, ops: Ops, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__()
        self.in_proj = Linear(hidden, channels, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.out_proj = Linear(channels, hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        out: Tensor = self.out_proj(memory * F.silu(self.in_proj(x)))
        return out
