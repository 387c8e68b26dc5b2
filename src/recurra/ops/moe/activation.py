"""What lies between an expert's two products."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


#: By the names that configurations use.
BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "relu2": _relu2,
}


def activate(h: Tensor, activation: str, gated: bool) -> Tensor:
    """(rows, 2 F) to act(first half) * second half, or (rows, F) to act of it."""
    act = BY_NAME[activation]
    if not gated:
        return act(h)
    gate, up = h.chunk(2, dim=-1)
    return act(gate) * up
