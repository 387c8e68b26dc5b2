"""Lightning attention as MiniMax has it: linear attention with a fixed decay a head.

    q, k, v = act(qkv(x)), by head
    y       = q . state, the state a decayed sum of k (outer) v
    out     = out_proj(sigmoid(gate(x)) * norm(y))

Sources: Lightning Attention-2 (Qin et al., 2024); MiniMax-01 (2025), section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, StateSpec, lightning_state
from recurra.layers.dtypes import Dtypes
from recurra.layers.linear import Linear
from recurra.layers.mlp import ACTIVATIONS
from recurra.layers.norm import RMSNorm
from recurra.ops import Ops
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class LightningSizes:
    """``log_decay``: of each head, at most 0, known without a checkpoint."""

    hidden: int
    num_heads: int
    head_dim: int
    log_decay: tuple[float, ...]
    activation: str = "silu"
    norm_eps: float = 1e-6

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim


class LightningAttention(nn.Module):
    """Mixes tokens by linear attention (see :class:`recurra.layers.base.Mixer`)."""

    def __init__(self, sizes: LightningSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        hidden, inner = sizes.hidden, sizes.inner
        self.qkv = Linear(hidden, 3 * inner, bias=False, ops=ops, dtypes=dtypes, device=device)
        self.gate = Linear(hidden, inner, bias=False, ops=ops, dtypes=dtypes, device=device)
        self.norm = RMSNorm(inner, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device)
        self.out_proj = Linear(inner, hidden, bias=False, ops=ops, dtypes=dtypes, device=device)
        decay = torch.tensor(sizes.log_decay, dtype=dtypes.recurrence, device=device)
        self.register_buffer("log_decay", decay, persistent=False)
        self.log_decay: Tensor
        self._act = ACTIVATIONS[sizes.activation]

    def state_spec(self) -> StateSpec:
        """State (heads, dim, dim) of one sequence."""
        s = self.sizes
        return lightning_state(s.num_heads, s.head_dim, s.head_dim, self._dtypes.ssm_state)

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        y = self._ops.lightning_attention_varlen(
            *self._heads(x), self.log_decay, state.ssm, batch.cu_seqlens, batch.prefill_slots,
            batch.has_state, batch.chunks, state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        return self._project(x, y)

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        y = self._ops.lightning_attention_update(
            state.ssm, *self._heads(x), self.log_decay, batch.decode_slots,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        return self._project(x, y)

    def _heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (T, heads, dim): the rows of a head lie together."""
        qkv = self._act(self.qkv(x)).view(x.shape[0], self.sizes.num_heads, -1)
        q, k, v = qkv.chunk(3, dim=-1)
        return q, k, v

    def _project(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.out_proj(torch.sigmoid(self.gate(x)) * self.norm(y.flatten(1)))
        return out
