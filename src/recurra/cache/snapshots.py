"""The region of device memory that holds snapshots: rows like the state pool's, in nobody's way."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class SnapshotPool:
    """Up to ``num_rows`` copies of a slot. A row is written once and read until it is freed.

    Args:
        bytes_per_row: of a slot of the state pool.
        num_rows: snapshots that fit.
        device: the state pool's.
    """

    def __init__(self, bytes_per_row: int, num_rows: int, device: torch.device) -> None:
        self.bytes_per_row = bytes_per_row
        self.num_rows = num_rows
        self.device = device
        self.rows = _room(num_rows, bytes_per_row, device)
        self._free = list(range(num_rows - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def used(self) -> frozenset[int]:
        return frozenset(self._used)

    def take(self) -> int:
        """A free row, to be written once."""
        assert self._free, "no row is free: give one up first"
        row = self._free.pop()
        self._used.add(row)
        return row

    def put_at(self, row: int, state: Tensor) -> None:
        """Copy a state, (bytes_per_row,) uint8 on any device, into a row just taken."""
        self.get(row).copy_(state)

    def get(self, row: int) -> Tensor:
        """A row in use, to be read only: (bytes_per_row,) uint8."""
        assert row in self._used, f"row {row} is not in use"
        return self.rows[row]

    def free(self, row: int) -> None:
        """Give a row back."""
        assert row in self._used, f"row {row} is not in use"
        self._used.remove(row)
        self._free.append(row)

    def check(self) -> None:
        """Assert that every row is in exactly one place."""
        free = set(self._free)
        assert len(free) == len(self._free), self._free
        assert not free & self._used, (self._free, self._used)
        assert len(free) + len(self._used) == self.num_rows, (self._free, self._used)


def _room(num_rows: int, bytes_per_row: int, device: torch.device) -> Tensor:
    """(num_rows, bytes_per_row) uint8. On a CPU, NumPy's zeros: memory that is taken as it is first written."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros((num_rows, bytes_per_row), np.uint8))
    return torch.zeros(num_rows, bytes_per_row, dtype=torch.uint8, device=device)
