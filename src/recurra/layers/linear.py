"""Projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recurra.layers.dtypes import Dtypes, optional, parameter
from recurra.ops import Ops


class Linear(nn.Module):
    """``x @ weight.T + bias``.

    Shapes: weight (out_features, in_features) in the weights' dtype, bias (out_features,) in the
    activations', x (rows, in_features) to (rows, out_features) in x's dtype.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        ops: Ops,
        dtypes: Dtypes,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = parameter(out_features, in_features, dtype=dtypes.weight, device=device)
        self.bias = optional(bias, out_features, dtype=dtypes.act, device=device)
        self._linear = ops.linear

    def forward(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.bias)
