"""Matrix product with a weight, whatever precision the weight is stored in."""

from __future__ import annotations

from typing import Protocol

import torch
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


class LinearScaled(Protocol):
    """``(x @ weight.T) * scale + bias``: a weight of 8-bit numbers, with a scale a row.

    Args:
        x: (rows, in_features), any row stride.
        weight: (out_features, in_features) int8 or float8_e4m3fn, contiguous, as :func:`kept_dtype` allows.
        scale: (out_features, 1) float32.
        bias: (out_features,) or None.

    Returns:
        (rows, out_features) in x's dtype.
    """

    def __call__(self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor: ...


def kept_dtype(device: torch.device) -> torch.dtype | None:
    """The 8-bit format whose weights :class:`LinearScaled` multiplies as they are on this device, if any."""
    if device.type == "cpu":
        return torch.int8
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        return torch.float8_e4m3fn
    return None
