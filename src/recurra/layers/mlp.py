"""Feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recurra.layers.dtypes import Dtypes
from recurra.layers.linear import Linear
from recurra.ops import Ops
from recurra.ops.moe.activation import BY_NAME as ACTIVATIONS

__all__ = ["ACTIVATIONS", "MLP", "GatedMLP"]


class GatedMLP(nn.Module):
    """``w_out(act(gate) * up)``: (rows, hidden) to the same; gate and up are the halves of one product."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        activation: str,
        bias: bool,
        ops: Ops,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.w_in = Linear(hidden, 2 * inner, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.w_out = Linear(inner, hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.act = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w_in(x).chunk(2, dim=-1)
        out: Tensor = self.w_out(self.act(gate) * up)
        return out


class MLP(nn.Module):
    """``w_out(act(w_in(x)))``: (rows, hidden) to the same."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        *,
        activation: str,
        bias: bool,
        ops: Ops,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.w_in = Linear(hidden, inner, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.w_out = Linear(inner, hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.act = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_out(self.act(self.w_in(x)))
        return out
