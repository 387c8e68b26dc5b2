"""A backend on a device, as the operator tests see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from recurra.device import detect
from recurra.ops.registry import BACKENDS, OPERATORS, implementation, refusal


@dataclass(frozen=True)
class Backend:
    """A backend on a device."""

    name: str
    device: torch.device

    def op(self, operator: str) -> Callable[..., Tensor]:
        """The backend's function, or a skip where another backend serves the operator."""
        row = next(o for o in OPERATORS if o.name == operator)
        function = implementation(row, self.name)
        if function is None:
            pytest.skip(f"{self.name} has no {operator}")
        return function

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Activation dtypes: the CPU backend computes in float32 alone."""
        return (torch.float32,) if self.name == "cpu" else (torch.float32, torch.bfloat16, torch.float16)

    @property
    def interpreted(self) -> bool:
        """Slow enough for tests to take smaller shapes."""
        return self.name == "triton" and self.device.type == "cpu"


def usable_backends() -> list[object]:
    cpu = detect("cpu")
    found: list[object] = []
    for name in BACKENDS:
        if refusal(name, cpu) is None:
            label = "interpreted" if name == "triton" else name
            found.append(pytest.param(Backend(name, torch.device("cpu")), id=label))
    for name in ("triton", "torch"):
        found.append(
            pytest.param(Backend(name, torch.device("cuda")), id=f"{name}_gpu", marks=pytest.mark.gpu)
        )
    return found
