"""Matrix product with a weight, whatever precision the weight is stored in."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """``x @ weight.T + bias``, accumulated in float32 or wider.

    Args:
        x: (rows, in_features), any row stride.
        weight: (out_features, in_features), contiguous; may be narrower than x (bfloat16 weights under
            float32 activations on the CPU).
        bias: (out_features,) or None.

    Returns:
        (rows, out_features) in x's dtype.
    """

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor: ...
