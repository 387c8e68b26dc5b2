"""Who waits for a slot: by priority, then by arrival, then by answer. No torch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from recurra.types import Sequence, Status

#: A saved state, opaque here.
Snapshot = Any


@dataclass(order=True, slots=True)
class Entry:
    """A place in the queue.

    Attributes:
        priority, order, index: of the request, of its arrival, of the answer: the least goes first.
        sequence: who waits.
        snapshot: its state; None: its prompt is still to be computed.
    """

    priority: int
    order: int
    index: int
    sequence: Sequence = field(compare=False)
    snapshot: Snapshot = field(default=None, compare=False)


class WaitingQueue:
    """Entries in order; those of finished sequences stay until they surface."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self.num_waiting = 0  # live entries
        self.num_new = 0  # of which no token is computed yet

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._heap)

    def push(self, entry: Entry) -> None:
        """Let somebody wait."""
        heapq.heappush(self._heap, entry)
        self.num_waiting += 1
        self.num_new += entry.snapshot is None

    def head(self) -> Entry | None:
        """Whose turn it is."""
        while self._heap and self._heap[0].sequence.status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None

    def pop(self) -> Entry:
        """Take out whose turn it is."""
        entry = self.head()
        assert entry is not None, "nobody waits"
        heapq.heappop(self._heap)
        self.num_waiting -= 1
        self.num_new -= entry.snapshot is None
        return entry

    def forget(self, sequence: Sequence) -> None:
        """A waiting sequence is about to be finished."""
        self.num_waiting -= 1
        self.num_new -= sequence.num_computed == 0

    def compact(self) -> None:
        """Drop entries of finished sequences once they are the greater part."""
        if len(self._heap) > 2 * self.num_waiting + 64:
            self._heap = [e for e in self._heap if e.sequence.status is not Status.FINISHED]
            heapq.heapify(self._heap)
