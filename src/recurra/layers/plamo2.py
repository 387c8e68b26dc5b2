"""PLaMo 2's mixers.

The Mamba layer lies between Mamba and Mamba-2: one decay a head as in Mamba-2, but B, C and dt are products of the
convolved input as in Mamba, each normed, and the gate comes without a norm.

    z, x     = in_proj(u)
    x        = silu(conv1d(x))
    B, C, dt = norms of bcdt_proj(x)
    y        = SSD(x, dt_proj(dt), A, B, C) + D * x
    out      = out_proj(y * silu(z))

Its attention norms queries and keys by head, each head with weights of its own. Source: PLaMo 2 (Preferred Networks,
2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, StateSpec, mamba2_state
from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.conv import Conv1dWeights
from recurra.layers.dtypes import Dtypes, parameter
from recurra.layers.linear import Linear
from recurra.layers.norm import RMSNorm, RMSNormGrouped
from recurra.ops import Ops
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class PlamoMambaSizes:
    """Numbers of one layer; H, P, N and W of ``docs/shapes.md``."""

    hidden: int
    num_heads: int
    head_dim: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    norm_eps: float

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim


class PlamoMamba(nn.Module):
    """Mixes tokens over time (see :class:`recurra.layers.base.Mixer`)."""

    def __init__(self, sizes: PlamoMambaSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        inner, heads, wide = sizes.inner, sizes.num_heads, dtypes.recurrence
        rows = 2 * sizes.state_size + sizes.dt_rank
        self.in_proj = Linear(sizes.hidden, 2 * inner, bias=False, ops=ops, dtypes=dtypes, device=device)
        self.conv1d = Conv1dWeights(inner, sizes.conv_kernel, bias=False, dtypes=dtypes, device=device)
        self.bcdt_proj = Linear(inner, rows, bias=False, ops=ops, dtypes=dtypes, device=device)
        self.dt_proj = Linear(sizes.dt_rank, heads, bias=False, ops=ops, dtypes=dtypes, device=device)
        self.B_norm = RMSNorm(sizes.state_size, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device)
        self.C_norm = RMSNorm(sizes.state_size, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device)
        self.dt_norm = RMSNorm(sizes.dt_rank, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device)
        self.A = parameter(heads, dtype=wide, device=device)
        self.D = parameter(heads, dtype=wide, device=device)
        self.dt_bias = parameter(heads, dtype=wide, device=device)
        self.out_proj = Linear(inner, sizes.hidden, bias=False, ops=ops, dtypes=dtypes, device=device)

    def state_spec(self) -> StateSpec:
        """Window (H P, W - 1) of x alone, and state (H, P, N) of one sequence."""
        s = self.sizes
        return mamba2_state(
            s.num_heads, s.head_dim, 0, s.state_size, s.conv_kernel,
            self._dtypes.conv_state, self._dtypes.ssm_state,
        )  # fmt: skip

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        z, u = self.in_proj(x).chunk(2, dim=-1)
        where = (batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks)
        u = self._ops.causal_conv1d_varlen(u, self.conv1d.weight, None, state.conv, *where, silu=True)
        dt, B, C = self._select(u)
        y = self._ops.mamba_chunk_scan_varlen(
            self._heads(u), dt, self.A, B, C, self.D, self.dt_bias, state.ssm, *where,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(y.flatten(1) * F.silu(z))
        return out

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        z, u = self.in_proj(x).chunk(2, dim=-1)
        slots = batch.decode_slots
        u = self._ops.causal_conv1d_update(u, self.conv1d.weight, None, state.conv, slots, silu=True)
        dt, B, C = self._select(u)
        y = self._ops.selective_state_update(
            state.ssm, self._heads(u), dt, self.A, B, C, self.D, None, self.dt_bias, slots,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(y.flatten(1) * F.silu(z))
        return out

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt (T, H), B and C (T, 1, N) of the convolved input."""
        N, rank = self.sizes.state_size, self.sizes.dt_rank
        B, C, dt = torch.split(self.bcdt_proj(u), [N, N, rank], dim=-1)
        normed = self.dt_norm(dt.contiguous())
        B, C = self.B_norm(B.contiguous()), self.C_norm(C.contiguous())
        return self.dt_proj(normed), B[:, None], C[:, None]

    def _heads(self, u: Tensor) -> Tensor:
        return u.view(u.shape[0], self.sizes.num_heads, self.sizes.head_dim)


class PlamoAttention(Attention):
    """Attention whose norms of queries and keys have weights of their own for each head."""

    def __init__(
        self, sizes: AttentionSizes, eps: float, *, ops: Ops, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__(sizes, ops=ops, dtypes=dtypes, device=device)
        dim, heads = sizes.head_dim, sizes.num_heads
        self.q_norm = RMSNormGrouped(heads * dim, dim, eps, ops=ops, dtypes=dtypes, device=device)
        self.k_norm = RMSNormGrouped(sizes.kv_rows, dim, eps, ops=ops, dtypes=dtypes, device=device)
