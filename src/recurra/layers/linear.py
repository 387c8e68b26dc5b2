"""Projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recurra.layers.dtypes import Dtypes, optional, parameter
from recurra.ops import Ops


class Linear(nn.Module):
    """``x @ weight.T + bias``.

    Shapes: weight (out_features, in_features) in the weights' dtype, bias (out_features,) in the
    activations', x (rows, in_features) to (rows, out_features) in x's dtype. A weight of 8 bits has a scale
    (out_features, 1) in float32.
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
        self.scale: nn.Parameter | None = None
        self._linear, self._linear_scaled = ops.linear, ops.linear_scaled

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            return self._linear_scaled(x, self.weight, self.scale, self.bias)
        return self._linear(x, self.weight, self.bias)

    def narrow(self, dtype: torch.dtype) -> None:
        """Make room for a weight of 8 bits in place of the wide one, before either is loaded."""
        rows, device = self.weight.shape[0], self.weight.device
        self.weight = parameter(*self.weight.shape, dtype=dtype, device=device)
        self.scale = parameter(rows, 1, dtype=torch.float32, device=device)
