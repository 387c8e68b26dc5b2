"""How states are rounded when they are stored in fewer bits than they are computed in: a value for all layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

#: Rounds of Philox when none are asked for: the fewest that passed the statistical tests of its authors
#: (Salmon et al., 2011, table 2).
DEFAULT_PHILOX_ROUNDS = 7

#: Formats whose rows have scales, and the scales' own.
SCALED = (torch.float8_e4m3fn, torch.int8)
SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Rounding:
    """Nearest (ties to even), or up or down by chance so that the mean of many roundings is the value.

    What is drawn is a function of ``seed``, ``step``, ``layer``, the slot, and the element's place in the
    slot, and of nothing else: see :mod:`recurra.ops.rounding`.

    Attributes:
        mode: "nearest" or "stochastic".
        philox_rounds: rounds of the generator; 0 is :data:`DEFAULT_PHILOX_ROUNDS`.
        layer: tells the states of one sequence apart, 0 to 65,535.
        seed: (1,) int64, on the states' device.
        step: (1,) int64, on the states' device; kernels read it when they run, so a replayed graph draws
            afresh once it has moved on.
    """

    mode: Literal["nearest", "stochastic"]
    philox_rounds: int
    layer: int
    seed: Tensor
    step: Tensor

    @property
    def stochastic(self) -> bool:
        return self.mode == "stochastic"

    @property
    def rounds(self) -> int:
        """Rounds of the generator, the default filled in."""
        return self.philox_rounds or DEFAULT_PHILOX_ROUNDS

    def of_layer(self, layer: int) -> Rounding:
        """The same for another layer: seed and step are shared, the draws are others."""
        return replace(self, layer=layer)

    def of_part(self, part: int) -> Rounding:
        """For pieces of a layer's states, up to 16, that calls of their own store: each draws its own."""
        assert self.layer < 4096, self.layer
        assert 0 <= part < 16, part
        return replace(self, layer=self.layer + 4096 * part)

    def advance(self) -> None:
        """Move to the next step, on the device; every layer's draws change."""
        if self.stochastic:
            self.step.add_(1)


def stochastic(seed: int, device: torch.device | str = "cpu", philox_rounds: int = 0) -> Rounding:
    """Stochastic rounding from the beginning of a run.

    Args:
        seed: any int64; the key of the generator.
        device: where the states are.
        philox_rounds: 1 to 10; 0 is the default.
    """
    assert 0 <= philox_rounds <= 10, philox_rounds
    return Rounding(
        "stochastic", philox_rounds, 0,
        torch.tensor([seed], dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
    )  # fmt: skip


#: Ties to even, and no generator.
NEAREST = Rounding("nearest", 0, 0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
