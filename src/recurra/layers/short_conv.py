"""LFM2's mixer: a gated short convolution between two projections.

    B, C, x = in_proj(u)
    out     = out_proj(C * conv1d(B * x))

Source: Liquid Foundation Models 2 (Liquid AI, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, StateSpec, short_conv_state
from recurra.layers.conv import Conv1dWeights
from recurra.layers.dtypes import Dtypes
from recurra.layers.linear import Linear
from recurra.ops import Ops
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class ShortConvSizes:
    """``bias``: of both projections and of the convolution."""

    hidden: int
    conv_kernel: int
    bias: bool = False


class ShortConv(nn.Module):
    """Mixes tokens over the last few (see :class:`recurra.layers.base.Mixer`)."""

    def __init__(self, sizes: ShortConvSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        hidden, bias = sizes.hidden, sizes.bias
        self.in_proj = Linear(hidden, 3 * hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.conv1d = Conv1dWeights(hidden, sizes.conv_kernel, bias=bias, dtypes=dtypes, device=device)
        self.out_proj = Linear(hidden, hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)

    def state_spec(self) -> StateSpec:
        """Window (hidden, W - 1) of one sequence."""
        return short_conv_state(self.sizes.hidden, self.sizes.conv_kernel, self._dtypes.conv_state)

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        B, C, u = self.in_proj(x).chunk(3, dim=-1)
        y = self._ops.short_conv_varlen(
            u, B, C, self.conv1d.weight, self.conv1d.bias, state.conv,
            batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks,
        )  # fmt: skip
        out: Tensor = self.out_proj(y)
        return out

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        B, C, u = self.in_proj(x).chunk(3, dim=-1)
        y = self._ops.short_conv_update(
            u, B, C, self.conv1d.weight, self.conv1d.bias, state.conv, batch.decode_slots
        )
        out: Tensor = self.out_proj(y)
        return out
