"""Who holds which slot. Numbers only: tensors are the pool's."""

from __future__ import annotations

from collections import deque

from recurra.types import SCRATCH_SLOT


class SlotAllocator:
    """Hands out slots 1 to ``num_slots``, the longest free one first; never the scratch slot.

    The order spreads reuse over the pool, so that a late reader of a released slot shows in tests.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots >= 1, num_slots
        self.num_slots = num_slots
        self._free = deque(range(SCRATCH_SLOT + 1, SCRATCH_SLOT + 1 + num_slots))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def allocate(self) -> int:
        """Take a slot; the caller has checked ``num_free``."""
        assert self._free, "no slot is free: admission must wait"
        slot = self._free.popleft()
        self._used.add(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back; giving one back twice is a bug."""
        assert slot in self._used, f"slot {slot} is not in use"
        self._used.remove(slot)
        self._free.append(slot)

    def check(self) -> None:
        """Assert that every slot is in exactly one place."""
        free = set(self._free)
        assert len(free) == len(self._free), self._free
        assert not free & self._used, (self._free, self._used)
        assert free | self._used == set(range(1, self.num_slots + 1)), (self._free, self._used)
