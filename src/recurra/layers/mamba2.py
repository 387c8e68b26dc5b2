"""The Mamba-2 mixer: one projection, one convolution over x, B and C, and a recurrence with one decay a head.

    z, xBC, dt = in_proj(u)
    x, B, C    = silu(conv1d(xBC))
    y          = SSD(x, dt, A, B, C) + D * x
    out        = out_proj(norm(y * silu(z)))

Source: Mamba-2 (Dao and Gu, 2024), section 7.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, StateSpec, mamba2_state
from recurra.layers.conv import Conv1dWeights
from recurra.layers.dtypes import Dtypes, parameter, tensor
from recurra.layers.linear import Linear
from recurra.layers.norm import RMSNorm, RMSNormGated
from recurra.ops import Ops
from recurra.ops.decode_stack import Mamba2Weights
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class Mamba2Sizes:
    """Numbers of one Mamba-2 layer; H, P, G, N and W of ``docs/shapes.md``.

    ``dt_limit`` bounds dt after softplus; ``norm_eps`` belongs to the gated norm; ``out_bias`` is that of the output
    projection where it isn't the input projection's.
    """

    hidden: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    conv_kernel: int
    norm_eps: float
    use_bias: bool = False
    use_conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    out_bias: bool | None = None

    @property
    def inner(self) -> int:
        """H * P, channels of x, y and z."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, then B, then C."""
        return self.inner + 2 * self.num_groups * self.state_size


class MambaMixer2(nn.Module):
    """Mixes tokens over time with Mamba-2's recurrence (see :class:`recurra.layers.base.Mixer`).

    Args:
        sizes: its numbers.
        norm: (y, z) to what the output projection gets, (rows, H * P) each; None: Mamba-2's gated norm.
    """

    def __init__(
        self,
        sizes: Mamba2Sizes,
        *,
        norm: nn.Module | None = None,
        ops: Ops,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        rows = 2 * sizes.inner + 2 * sizes.num_groups * sizes.state_size + sizes.num_heads
        bias = sizes.use_bias
        self.in_proj = Linear(sizes.hidden, rows, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.conv1d = Conv1dWeights(
            sizes.conv_channels, sizes.conv_kernel, bias=sizes.use_conv_bias, dtypes=dtypes, device=device
        )
        self.A = parameter(sizes.num_heads, dtype=dtypes.recurrence, device=device)
        self.D = parameter(sizes.num_heads, dtype=dtypes.recurrence, device=device)
        self.dt_bias = parameter(sizes.num_heads, dtype=dtypes.recurrence, device=device)
        group = sizes.inner // sizes.num_groups
        self.norm = norm or RMSNormGated(
            sizes.inner, group, sizes.norm_eps, ops=ops, dtypes=dtypes, device=device
        )
        bias = bias if sizes.out_bias is None else sizes.out_bias
        self.out_proj = Linear(sizes.inner, sizes.hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)

    def state_spec(self) -> StateSpec:
        """Window (conv_channels, W - 1) and state (H, P, N) of one sequence."""
        s = self.sizes
        return mamba2_state(
            s.num_heads, s.head_dim, s.num_groups, s.state_size, s.conv_kernel,
            self._dtypes.conv_state, self._dtypes.ssm_state,
        )  # fmt: skip

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        z, xBC, dt = self.project(x)
        where = (batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks)
        conv = self.conv1d
        xBC = self._ops.causal_conv1d_varlen(xBC, conv.weight, conv.bias, state.conv, *where, silu=True)
        xs, B, C = self._split(xBC)
        y = self._ops.mamba_chunk_scan_varlen(
            xs, dt, self.A, B, C, self.D, self.dt_bias, state.ssm, *where, dt_limit=self.sizes.dt_limit,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(self.norm(y.flatten(1), z))
        return out

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        z, xBC, dt = self.project(x)
        slots, conv = batch.decode_slots, self.conv1d
        xBC = self._ops.causal_conv1d_update(xBC, conv.weight, conv.bias, state.conv, slots, silu=True)
        xs, B, C = self._split(xBC)
        y = self._ops.selective_state_update(
            state.ssm, xs, dt, self.A, B, C, self.D, None, self.dt_bias, slots, dt_limit=self.sizes.dt_limit,
            state_scale=state.scale, rounding=state.rounding,
        )  # fmt: skip
        out: Tensor = self.out_proj(self.norm(y.flatten(1), z))
        return out

    def stack_weights(self, norm: RMSNorm) -> Mamba2Weights:
        """This block's tensors for the fused decode step; nothing is copied."""
        s, gated = self.sizes, self.norm
        assert isinstance(gated, RMSNormGated)
        return Mamba2Weights(
            norm=norm.weight.data,
            norm_eps=norm.eps,
            in_proj=self.in_proj.weight.data,
            in_proj_bias=tensor(self.in_proj.bias),
            conv_weight=self.conv1d.weight.data,
            conv_bias=tensor(self.conv1d.bias),
            dt_bias=self.dt_bias.data,
            A=self.A.data,
            D=self.D.data,
            dt_limit=s.dt_limit,
            gated_norm=gated.weight.data,
            gated_norm_eps=gated.eps,
            gated_norm_group=gated.group_size,
            out_proj=self.out_proj.weight.data,
            out_proj_bias=tensor(self.out_proj.bias),
            num_heads=s.num_heads,
            head_dim=s.head_dim,
            num_groups=s.num_groups,
            state_size=s.state_size,
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """z (T, H * P), xBC (T, conv channels) and dt (T, H): views of one product."""
        s = self.sizes
        z, xBC, dt = torch.split(self.in_proj(x), [s.inner, s.conv_channels, s.num_heads], dim=-1)
        return z, xBC, dt

    def _split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H, P), B and C (T, G, N): views."""
        s = self.sizes
        group_columns = s.num_groups * s.state_size
        x, B, C = torch.split(xBC, [s.inner, group_columns, group_columns], dim=-1)
        rows = xBC.shape[0]
        groups = (rows, s.num_groups, s.state_size)
        return x.view(rows, s.num_heads, s.head_dim), B.view(groups), C.view(groups)
