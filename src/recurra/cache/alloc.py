"""Who holds which slot and which pages. Numbers only: tensors are the pools'."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from recurra.types import SCRATCH_PAGE, SCRATCH_SLOT


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


class PageAllocator:
    """Hands out pages 1 to ``num_pages``; a page may have several holders, and is free when all let go.

    Args:
        num_pages: 0 in a model without attention.
        page_size: tokens of a page; 0 in such a model, whose sequences need no pages.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages >= 0, num_pages
        assert (num_pages == 0) == (page_size == 0), (num_pages, page_size)
        self.num_pages, self.page_size = num_pages, page_size
        self._free = deque(range(SCRATCH_PAGE + 1, SCRATCH_PAGE + 1 + num_pages))
        self._holders: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` tokens."""
        return -(-tokens // self.page_size) if self.page_size else 0

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` pages; the caller has checked ``num_free``."""
        assert count <= len(self._free), "pages are out: admission must wait, or somebody must yield"
        taken = [self._free.popleft() for _ in range(count)]
        self._holders.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Add a holder to each page; all holders only read from then on."""
        for page in pages:
            assert page in self._holders, f"page {page} is not in use"
            self._holders[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Let go of pages; letting go more often than holding is a bug."""
        for page in pages:
            assert page in self._holders, f"page {page} is not in use"
            self._holders[page] -= 1
            if self._holders[page] == 0:
                del self._holders[page]
                self._free.append(page)

    def check(self) -> None:
        """Assert that every page is in exactly one place."""
        free = set(self._free)
        assert len(free) == len(self._free), self._free
        assert not free & self._holders.keys(), (self._free, self._holders)
        assert len(free) + len(self._holders) == self.num_pages, (free, self._holders)
