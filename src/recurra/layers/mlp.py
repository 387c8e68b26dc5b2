"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.layers.dtypes import Dtypes
from recurra.layers.linear import Linear
from recurra.ops import Ops


def relu2(x: Tensor) -> Tensor:
    """``max(x, 0)^2``."""
    return F.relu(x).square()


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh formula."""
    return F.gelu(x, approximate="tanh")


#: By the names that configurations use.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": F.relu,
    "relu2": relu2,
}


class GatedMLP(nn.Module):
    """``w_out(act(gate) * up)``: (rows, hidden) to the same; gate and up are the halves of one product.

    Args:
        gate_scale: of the gate before the activation (FalconH1's multiplier).
        out_scale: of the result, likewise.
    """

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
        gate_scale: float = 1.0,
        out_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.w_in = Linear(hidden, 2 * inner, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.w_out = Linear(inner, hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self._act = ACTIVATIONS[activation]
        self._gate_scale, self._out_scale = gate_scale, out_scale

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w_in(x).chunk(2, dim=-1)
        if self._gate_scale != 1.0:
            gate = gate * self._gate_scale
        out: Tensor = self.w_out(self._act(gate) * up)
        return out if self._out_scale == 1.0 else out * self._out_scale


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
        self._act = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_out(self._act(self.w_in(x)))
        return out
