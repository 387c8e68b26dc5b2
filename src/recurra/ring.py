"""The inputs that a replayed recurrence keeps beside its state: a value for one layer."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Ring(NamedTuple):
    """The last inputs of a Mamba-2 recurrence, by slot, R of them at most. Written in place.

    x: (slots, R, H, P); dt: (slots, R, H) float32, the steps themselves (bias, softplus and bounds applied);
    B: (slots, R, G, N). Each slot's part is contiguous.
    at: (slots, G, 2) int32: the place of the oldest entry, and how many there are. The same for every group: each has
        its own, so that it can be moved on by the one program that reads it.
    """

    x: Tensor
    dt: Tensor
    B: Tensor
    at: Tensor
