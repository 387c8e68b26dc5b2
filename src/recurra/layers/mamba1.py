"""The Mamba mixer: a convolution over x alone, and a recurrence with a decay for every channel and state.

    x, z     = in_proj(u)
    x        = silu(conv1d(x))
    dt, B, C = x_proj(x)                       (FalconMamba and Jamba normalise each of the three)
    y        = scan(x, dt_proj(dt), A, B, C) + D * x
    out      = out_proj(y * silu(z))

Source: Mamba (Gu and Dao, 2023), section 3.4; FalconMamba (Zuo et al., 2024) and Jamba (Lieber et al.,
2024) for the norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, StateSpec, mamba1_state
from recurra.layers.conv import Conv1dWeights
from recurra.layers.dtypes import Dtypes, optional, parameter, tensor
from recurra.layers.linear import Linear
from recurra.layers.norm import RMSNorm
from recurra.ops import Ops
from recurra.ops.decode_stack import Mamba1Weights
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class Mamba1Sizes:
    """Numbers of one Mamba layer.

    ``bcdt_norm_eps`` is the epsilon of norms on B, C and dt; None means that there are none, as in Mamba. With
    ``bcdt_norm_weights`` they have weights, as in Jamba; without, as in FalconMamba.
    """

    hidden: int
    channels: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    use_bias: bool = False
    use_conv_bias: bool = True
    bcdt_norm_eps: float | None = None
    bcdt_norm_weights: bool = False


class MambaMixer(nn.Module):
    """Mixes tokens over time with Mamba's recurrence (see :class:`recurra.layers.base.Mixer`)."""

    def __init__(self, sizes: Mamba1Sizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        inner, bias = sizes.channels, sizes.use_bias
        self.in_proj = Linear(sizes.hidden, 2 * inner, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.conv1d = Conv1dWeights(
            inner, sizes.conv_kernel, bias=sizes.use_conv_bias, dtypes=dtypes, device=device
        )
        x_rows = sizes.dt_rank + 2 * sizes.state_size
        self.x_proj = Linear(inner, x_rows, bias=False, ops=ops, dtypes=dtypes, device=device)
        # Its bias joins dt inside the recurrence, in float32, so it isn't the projection's.
        self.dt_proj = Linear(sizes.dt_rank, inner, bias=False, ops=ops, dtypes=dtypes, device=device)
        self.dt_bias = parameter(inner, dtype=dtypes.recurrence, device=device)
        self.A = parameter(inner, sizes.state_size, dtype=dtypes.recurrence, device=device)
        self.D = parameter(inner, dtype=dtypes.recurrence, device=device)
        self.out_proj = Linear(inner, sizes.hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)
        has, width = sizes.bcdt_norm_weights, sizes.state_size
        self.dt_norm = optional(has, sizes.dt_rank, dtype=dtypes.act, device=device)
        self.B_norm = optional(has, width, dtype=dtypes.act, device=device)
        self.C_norm = optional(has, width, dtype=dtypes.act, device=device)

    def state_spec(self) -> StateSpec:
        """Window (channels, W - 1) and state (channels, N) of one sequence."""
        s = self.sizes
        return mamba1_state(
            s.channels, s.state_size, s.conv_kernel, self._dtypes.conv_state, self._dtypes.ssm_state
        )

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        where = (batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks)
        conv = self.conv1d
        u = self._ops.causal_conv1d_varlen(u, conv.weight, conv.bias, state.conv, *where, silu=True)
        dt, B, C = self._select(u)
        y = self._ops.selective_scan_varlen(
            u, dt, self.A, B, C, self.D, z, self.dt_bias, state.ssm, *where, state_scale=state.scale,
            rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(y)
        return out

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        slots, conv = batch.decode_slots, self.conv1d
        u = self._ops.causal_conv1d_update(u, conv.weight, conv.bias, state.conv, slots, silu=True)
        dt, B, C = self._select(u)
        y = self._ops.selective_state_update(
            state.ssm, u, dt, self.A, B, C, self.D, z, self.dt_bias, slots, state_scale=state.scale,
            rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(y)
        return out

    def stack_weights(self, norm: RMSNorm) -> Mamba1Weights:
        """This block's tensors for the fused decode step; nothing is copied."""
        return Mamba1Weights(
            norm=norm.weight.data,
            norm_eps=norm.eps,
            in_proj=self.in_proj.weight.data,
            in_proj_bias=tensor(self.in_proj.bias),
            conv_weight=self.conv1d.weight.data,
            conv_bias=tensor(self.conv1d.bias),
            x_proj=self.x_proj.weight.data,
            dt_proj=self.dt_proj.weight.data,
            dt_bias=self.dt_bias.data,
            A=self.A.data,
            D=self.D.data,
            out_proj=self.out_proj.weight.data,
            out_proj_bias=tensor(self.out_proj.bias),
            bcdt_norm_eps=self.sizes.bcdt_norm_eps,
        )

    def _select(self, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What makes the recurrence selective: dt (T, channels) before its bias, B and C (T, N)."""
        s = self.sizes
        dt, B, C = torch.split(self.x_proj(u), [s.dt_rank, s.state_size, s.state_size], dim=-1)
        if s.bcdt_norm_eps is not None:
            parts = ((dt, self.dt_norm), (B, self.B_norm), (C, self.C_norm))
            dt, B, C = (self._ops.rms_norm(part, tensor(norm), s.bcdt_norm_eps) for part, norm in parts)
        return self.dt_proj(dt), B, C
