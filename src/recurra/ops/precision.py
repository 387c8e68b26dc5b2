"""The precision that the references compute in."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(*tensors: Tensor) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
