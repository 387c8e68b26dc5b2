"""The state pool: every sequence's whole memory is one contiguous row of bytes.

A row (a *slot*) holds the states of all layers, one after the other. Layers see typed views into it;
saving, restoring and forking a sequence is one copy of one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.cache.spec import ALIGNMENT, ConvSSM, StateSpec, TensorSpec
from recurra.rounding import NEAREST, Rounding
from recurra.types import SCRATCH_SLOT


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class StatePool:
    """States of up to ``num_slots`` sequences, plus the scratch slot 0.

    Args:
        specs: one for each layer.
        num_slots: sequences that can be held at once; rows 1 to ``num_slots``.
        device: where the rows live.
        rounding: how recurrent states are rounded when they are written; each layer's view has its own draws.
    """

    def __init__(
        self,
        specs: tuple[StateSpec, ...],
        num_slots: int,
        device: torch.device,
        rounding: Rounding = NEAREST,
    ) -> None:
        self.rounding = rounding
        self.specs = specs
        self.num_slots = num_slots
        self.bytes_per_slot = slot_bytes(specs)
        self.rows = torch.zeros(num_slots + 1, self.bytes_per_slot, dtype=torch.uint8, device=device)
        self.layers: tuple[ConvSSM, ...] = self._views()

    def _views(self) -> tuple[ConvSSM, ...]:
        offset, layers = 0, list[ConvSSM]()
        for spec in self.specs:
            tensors = []
            for tensor in spec.tensors:
                tensors.append(self._view(tensor, offset))
                offset += _align(tensor.nbytes)
            conv, ssm, scale = tensors
            layers.append(ConvSSM(conv, ssm, scale, self.rounding.of_layer(len(layers))))
        return tuple(layers)

    def _view(self, spec: TensorSpec, offset: int) -> Tensor:
        flat = self.rows[:, offset : offset + spec.nbytes].view(spec.dtype)
        return flat.view(flat.shape[0], *spec.shape)

    def reset(self, slot: int) -> None:
        """Fill a slot with zeros, the state before any token."""
        self.rows[slot].zero_()

    def save(self, slot: int) -> Tensor:
        """Copy a slot out: (bytes_per_slot,) uint8, never written again."""
        return self.rows[slot].clone()

    def restore(self, slot: int, snapshot: Tensor) -> None:
        """Copy a saved row into a slot; the snapshot is unchanged."""
        assert slot != SCRATCH_SLOT, "slot 0 is scratch"
        self.rows[slot].copy_(snapshot)

    def fork(self, source: int, target: int) -> None:
        """Make ``target`` an independent copy of ``source``."""
        assert target != SCRATCH_SLOT, "slot 0 is scratch"
        self.rows[target].copy_(self.rows[source])


def slot_bytes(specs: tuple[StateSpec, ...]) -> int:
    """Bytes of one sequence's states over all layers, alignment included."""
    return sum(_align(t.nbytes) for spec in specs for t in spec.tensors) or ALIGNMENT
