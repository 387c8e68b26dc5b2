"""Small copies between the host and the device that nobody waits for.

A plain copy from the host to a GPU waits until everything queued before it is done. These go through
pinned memory, in the order of the stream.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device; on the CPU it shares the array's memory."""
    found = torch.from_numpy(array)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def column(values: list[float] | list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A list of numbers on the device."""
    found = torch.tensor(values, dtype=dtype)
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Columns of 32-bit numbers on their way to the host, in one copy.

    Args:
        columns: vectors of float32 or int32 on one device; what changes them later doesn't change the copy.
    """

    def __init__(self, *columns: Tensor) -> None:
        self._kinds = [(len(column), column.dtype) for column in columns]
        packed = torch.cat([column.view(torch.int32) for column in columns])
        self._event: torch.cuda.Event | None = None
        self._host = packed
        if packed.device.type != "cpu":
            self._host = torch.empty(packed.shape, dtype=torch.int32, pin_memory=True)
            self._host.copy_(packed, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(packed.device))

    def read(self) -> list[NDArray[np.int32] | NDArray[np.float32]]:
        """Wait for the copy, and for nothing that was queued after it."""
        if self._event is not None:
            self._event.synchronize()
        parts, at = [], 0
        for length, dtype in self._kinds:
            parts.append(self._host[at : at + length].view(dtype).numpy())
            at += length
        return parts
