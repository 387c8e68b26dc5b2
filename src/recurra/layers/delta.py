"""Mixers of the delta rule: gated delta nets, whose heads decay, and Kimi delta attention, whose channels do.

    q, k, v = silu(conv1d(qkv))                 # q and k divided by their norms
    y       = delta_rule(q, k, v, g, beta)      # g: log decay, beta: strength of the correction
    out     = out_proj(norm(y) * act(z))        # normalised head by head

A gated delta net has ``g = A softplus(a + dt_bias)`` with one ``a`` a head and gates with silu; Kimi delta attention has
one ``a`` a channel and gates with the sigmoid, and its ``a`` and ``z`` may pass through bottlenecks. Sources: Gated Delta
Networks (Yang et al., 2024), section 3.3; Kimi Linear (Moonshot AI, 2025), section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, StateSpec, delta_state
from recurra.layers.conv import Conv1dWeights
from recurra.layers.dtypes import Dtypes, parameter
from recurra.layers.linear import Linear
from recurra.layers.norm import NormThenGate, NormThenSigmoid
from recurra.ops import Ops
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """Numbers of one delta layer.

    Attributes:
        hidden: width of input and output.
        key_heads, value_heads: heads of q and k, and the multiple of them that v has.
        key_dim, value_dim: K and V, of each head.
        conv_kernel: W.
        norm_eps: of the norm before the gate.
        beta_scale: of the corrections' strength; 2 lets a state's eigenvalues be negative.
        rank: of Kimi delta attention's bottlenecks; 0 without.
        decay_bound: least log decay of a token in Kimi delta attention, which then is ``bound sigmoid(-A (a + dt_bias))``;
            None: ``A softplus(a + dt_bias)``, which has no bound.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float
    beta_scale: float = 1.0
    rank: int = 0
    decay_bound: float | None = None

    @property
    def keys(self) -> int:
        """Channels of q, and of k."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of v, and of z."""
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: q, then k, then v."""
        return 2 * self.keys + self.values


class DeltaMixer(nn.Module):
    """What both kinds share (see :class:`recurra.layers.base.Mixer`).

    Args:
        sizes: its numbers.
        rows: of the projection of the input.
        norm: (y, z) to what the output projection gets, (rows, Hv * V) each.
    """

    def __init__(
        self, sizes: DeltaSizes, rows: int, norm: nn.Module, *, ops: Ops, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        self.in_proj = Linear(sizes.hidden, rows, bias=False, ops=ops, dtypes=dtypes, device=device)
        self.conv1d = Conv1dWeights(
            sizes.conv_channels, sizes.conv_kernel, bias=False, dtypes=dtypes, device=device
        )
        self.A = parameter(sizes.value_heads, dtype=dtypes.recurrence, device=device)
        self.norm = norm
        self.out_proj = Linear(sizes.values, sizes.hidden, bias=False, ops=ops, dtypes=dtypes, device=device)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What goes into the convolution (T, conv channels), z (T, Hv * V), g (T, Hv or Hv, K) and beta (T, Hv)."""
        raise NotImplementedError

    def state_spec(self) -> StateSpec:
        """Window (conv channels, W - 1) and state (Hv, K, V) of one sequence."""
        s = self.sizes
        return delta_state(
            s.key_heads, s.value_heads, s.key_dim, s.value_dim, s.conv_kernel, self._dtypes.conv_state,
            self._dtypes.ssm_state,
        )  # fmt: skip

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        mixed, z, g, beta = self.project(x)
        where = (batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks)
        conv = self.conv1d
        mixed = self._ops.causal_conv1d_varlen(mixed, conv.weight, conv.bias, state.conv, *where, silu=True)
        q, k, v = self._split(mixed)
        y = self._ops.gated_delta_rule_varlen(
            q, k, v, g, beta, state.ssm, *where, scale=self.sizes.key_dim**-0.5, qk_l2norm=True,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(self.norm(y.flatten(1), z))
        return out

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        mixed, z, g, beta = self.project(x)
        slots, conv = batch.decode_slots, self.conv1d
        mixed = self._ops.causal_conv1d_update(mixed, conv.weight, conv.bias, state.conv, slots, silu=True)
        q, k, v = self._split(mixed)
        y = self._ops.gated_delta_rule_update(
            state.ssm, q, k, v, g, beta, slots, scale=self.sizes.key_dim**-0.5, qk_l2norm=True,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(self.norm(y.flatten(1), z))
        return out

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k (T, Hk, K), v (T, Hv, V): views."""
        s, rows = self.sizes, mixed.shape[0]
        q, k, v = torch.split(mixed, [s.keys, s.keys, s.values], dim=-1)
        of_keys = (rows, s.key_heads, s.key_dim)
        return q.view(of_keys), k.view(of_keys), v.view(rows, s.value_heads, s.value_dim)

    def _beta(self, b: Tensor) -> Tensor:
        beta = torch.sigmoid(b.to(self.A.dtype))
        return beta if self.sizes.beta_scale == 1.0 else beta * self.sizes.beta_scale


class GatedDeltaNet(DeltaMixer):
    """One decay a head. The projection's rows: q, k, v, z, then a b and an a for each head of v."""

    def __init__(self, sizes: DeltaSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        rows = sizes.conv_channels + sizes.values + 2 * sizes.value_heads
        norm = NormThenGate(
            sizes.values, sizes.value_dim, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device
        )
        super().__init__(sizes, rows, norm, ops=ops, dtypes=dtypes, device=device)
        self.dt_bias = parameter(sizes.value_heads, dtype=dtypes.recurrence, device=device)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`DeltaMixer`; g is (T, Hv)."""
        s = self.sizes
        parts = [s.conv_channels, s.values, s.value_heads, s.value_heads]
        mixed, z, b, a = torch.split(self.in_proj(x), parts, dim=-1)
        g = self.A * F.softplus(a.to(self.A.dtype) + self.dt_bias)
        return mixed, z, g, self._beta(b)


class KimiDeltaAttention(DeltaMixer):
    """One decay a channel. The projection's rows: q, k, v, those of a and of z (or their bottlenecks), a b for each head."""

    def __init__(self, sizes: DeltaSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        assert sizes.key_heads == sizes.value_heads, "a head of v decays as its own head of k does"
        norm = NormThenSigmoid(
            sizes.values, sizes.value_dim, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device
        )
        super().__init__(sizes, sum(self.parts(sizes)), norm, ops=ops, dtypes=dtypes, device=device)
        self.dt_bias = parameter(sizes.keys, dtype=dtypes.recurrence, device=device)
        self.decay_proj: Linear | None = None
        self.gate_proj: Linear | None = None
        if sizes.rank:
            self.decay_proj, self.gate_proj = (
                Linear(sizes.rank, rows, bias=False, ops=ops, dtypes=dtypes, device=device)
                for rows in (sizes.keys, sizes.values)
            )

    @staticmethod
    def parts(sizes: DeltaSizes) -> list[int]:
        """Rows of the projection by what they give."""
        return [sizes.conv_channels, sizes.rank or sizes.keys, sizes.rank or sizes.values, sizes.value_heads]

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See :class:`DeltaMixer`; g is (T, Hv, K)."""
        mixed, a, z, b = torch.split(self.in_proj(x), self.parts(self.sizes), dim=-1)
        if self.decay_proj is not None and self.gate_proj is not None:
            a, z = self.decay_proj(a), self.gate_proj(z)
        return mixed, z, self._decay(a), self._beta(b)

    def _decay(self, a: Tensor) -> Tensor:
        s = self.sizes
        steps = (a.to(self.A.dtype) + self.dt_bias).view(-1, s.key_heads, s.key_dim)
        if s.decay_bound is None:
            return self.A[:, None] * F.softplus(steps)
        return s.decay_bound * torch.sigmoid(-self.A[:, None] * steps)
