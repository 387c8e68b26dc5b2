"""The contract of a mixer: the part of a block that remembers."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from recurra.cache.spec import AnySpec, LayerState
from recurra.types import ForwardBatch

State_contra = TypeVar("State_contra", bound=LayerState, contravariant=True)


class Mixer(Protocol[State_contra]):
    """Mixes information over time, its memory handed in.

    ``state`` is the layer's view of the whole pool; both methods read and write, in place, the rows
    that ``batch`` names and no others. One method per mode: a mixer never asks which mode it is in.
    """

    def state_spec(self) -> AnySpec:
        """What one sequence's memory of this layer is."""
        ...

    def prefill(self, x: Tensor, batch: ForwardBatch, state: State_contra) -> Tensor:
        """Mix the packed prefill tokens: x (prefill tokens, hidden) to the same shape."""
        ...

    def decode(self, x: Tensor, batch: ForwardBatch, state: State_contra) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden) to the same shape."""
        ...


def mix(mixer: Mixer[Any], x: Tensor, batch: ForwardBatch, state: LayerState) -> Tensor:
    """Run both modes over a step's tokens: decode rows first, then prefill."""
    if batch.num_prefill_tokens == 0:
        return mixer.decode(x, batch, state)
    if batch.num_decode == 0:
        return mixer.prefill(x, batch, state)
    decoded = mixer.decode(x[: batch.num_decode], batch, state)
    return torch.cat((decoded, mixer.prefill(x[batch.num_decode :], batch, state)))
