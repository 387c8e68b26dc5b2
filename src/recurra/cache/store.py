"""Where kept states lie: rows on the device, then the host's memory, then files; a budget for each.

What goes down is copied by one worker thread while the device works; what is given up above stays
reachable below. All decisions, and every change of the tree, are made by the thread that calls.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from recurra.cache.disk import DiskStore
from recurra.cache.prefix import Entry, Loss, PrefixTree, Ranking, unpack
from recurra.cache.snapshots import SnapshotPool
from recurra.cache.state_file import SavedState
from recurra.errors import StateError

log = logging.getLogger("recurra")

#: States on their way down at a time; more wait above, or are given up there.
MOST_MOVING = 64


class Pages(Protocol):
    """What the tiers need of the pages of keys and values."""

    def save(self, pages: Sequence[int]) -> tuple[Tensor, ...]:
        """Copies of some pages."""

    def free(self, pages: Sequence[int]) -> None:
        """Let go of pages that an entry held."""


@dataclass(slots=True, eq=False)
class Copies:
    """Where an entry's state lies.

    Attributes:
        row: of the device's region.
        host: in the host's memory.
        file: name of its file.
        moving: it is on its way down.
    """

    row: int | None = None
    host: SavedState | None = None
    file: str | None = None
    file_bytes: int = 0
    moving: bool = False

    @property
    def anywhere(self) -> bool:
        return self.row is not None or self.host is not None or self.file is not None


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that each tier may take below the device's rows; 0 is no such tier."""

    host: int = 0
    disk: int = 0


@dataclass(frozen=True, slots=True)
class _Arrival:
    entry: Entry
    saved: SavedState | None
    file: str | None
    file_bytes: int


class Tiers:
    """Keeps the states of a tree's entries.

    Args:
        tree: the entries; one that is nowhere any more is removed from it.
        rows: the device's region.
        fingerprint: written into what is saved.
        budgets: of the tiers below.
        disk: None: no files.
        pages: keys and values, in a model that has them.
    """

    def __init__(
        self,
        tree: PrefixTree,
        rows: SnapshotPool,
        fingerprint: str,
        budgets: Budgets,
        disk: DiskStore | None = None,
        pages: Pages | None = None,
    ) -> None:
        self.tree, self.rows, self.fingerprint = tree, rows, fingerprint
        self.budgets, self.disk, self._pages = budgets, disk, pages
        self.host_bytes = self.disk_bytes = 0
        self.given_up = 0  # entries that went for want of room
        self.damaged = 0  # files that were not what they should be
        self._on_device, self._on_host, self._on_disk = Ranking(), Ranking(), Ranking()
        self._arrivals: deque[_Arrival] = deque()
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._moving = 0
        self._worker: threading.Thread | None = None
        self._below = budgets.host > 0 or disk is not None
        if disk is not None:
            self._adopt(disk)

    # ---- what callers do ----

    def keep(self, entry: Entry, state: Tensor, page_bytes: int = 0) -> bool:
        """Copy a state, (bytes,) uint8 on the device, for an entry that is new in the tree, or known.

        Args:
            page_bytes: what the entry's pages take.

        Returns:
            False: there is no room for it, and it is not in the tree any more.
        """
        copies = self._copies(entry)
        entry.pins += 1  # making room must not take it
        self.settle()
        if copies.row is None and (row := self._free_row()) is not None:
            copies.row = row
            self.rows.put_at(row, state)
        entry.pins -= 1
        if not copies.anywhere:
            self._drop(entry, None)
            return False
        if copies.row is None:
            self._free_pages(entry)
        entry.nbytes = self.rows.bytes_per_row + page_bytes
        self.use(entry)
        self._rank_anew(entry)
        self._send_down(entry)
        return True

    def use(self, entry: Entry) -> None:
        """Note that an entry was used: it stays longer wherever it lies."""
        copies = self._copies(entry)
        for there, ranking in (
            (copies.row is not None, self._on_device),
            (copies.host is not None, self._on_host),
            (copies.file is not None, self._on_disk),
        ):
            if there:
                ranking.use(entry)

    def fetch(self, entry: Entry) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """A state to copy into a slot, and its pages where these aren't on the device any more.

        Good until the next call. None: its file was damaged, and the entry is gone.
        """
        copies = self._copies(entry)
        if copies.row is not None:
            return self.rows.get(copies.row), ()
        saved = copies.host if copies.host is not None else self._read(entry, copies)
        if saved is None:
            return None
        if saved.pages:  # a row without its pages is of no use
            return saved.row, saved.pages
        entry.pins += 1  # making room must not take it
        row = self._free_row()
        entry.pins -= 1
        if row is not None:
            copies.row = row
            self.rows.put_at(row, saved.row)
            self._on_device.use(entry)
        return saved.row, saved.pages

    def saved(self, entry: Entry) -> SavedState | None:
        """A copy for somebody outside; None: its file was damaged."""
        copies = self._copies(entry)
        if copies.row is not None:
            return self._save(entry, entry.packed(), self.rows.get(copies.row))
        return copies.host if copies.host is not None else self._read(entry, copies)

    def refuse(self, entry: Entry) -> bool:
        """There is no room for an entry: take it out of the tree, unless it is kept somewhere; returns that."""
        if not self._copies(entry).anywhere:
            self._drop(entry, None)
        return entry.live

    def drop(self, entry: Entry, why: Loss) -> None:
        """Give an entry up everywhere."""
        self._drop(entry, why)

    def make_way(self) -> bool:
        """Give up the row and the pages of the entry that is worth least; False: nobody can go."""
        worst = self._on_device.worst()
        if worst is None:
            return False
        self._leave_device(worst, "pages_gone")
        return True

    # ---- what comes back from the worker ----

    def settle(self) -> None:
        """Take in what the worker has finished, and keep the budgets."""
        while self._arrivals:
            arrival = self._arrivals.popleft()
            entry, copies = arrival.entry, self._copies(arrival.entry)
            self._moving -= 1
            entry.pins -= 1
            copies.moving = False
            if arrival.saved is not None and self.budgets.host >= arrival.saved.nbytes:
                copies.host = arrival.saved
                self.host_bytes += arrival.saved.nbytes
                self._on_host.use(entry)
            if arrival.file is not None:
                copies.file, copies.file_bytes = arrival.file, arrival.file_bytes
                self.disk_bytes += arrival.file_bytes
                self._on_disk.use(entry)
        self._trim()

    def flush(self) -> None:
        """Wait until everything that is on its way down has arrived."""
        if self._worker is not None:
            self._work.join()
        self.settle()

    def close(self) -> None:
        """Finish what is under way and let go of the folder."""
        self.flush()
        if self._worker is not None:
            self._work.put(None)
            self._worker.join()
            self._worker = None
        if self.disk is not None:
            self.disk.close()
            self.disk = None
        self._below = False

    def check(self) -> None:
        """Assert that every copy belongs to an entry, and that the sums are right."""
        held = [self._copies(entry) for entry in self.tree]
        assert all(copies.anywhere for copies in held), held
        assert sorted(c.row for c in held if c.row is not None) == sorted(self.rows.used)
        assert self.host_bytes == sum(c.host.nbytes for c in held if c.host is not None)
        assert self.disk_bytes == sum(c.file_bytes for c in held if c.file is not None)
        assert len(self._on_device) == self.rows.num_used
        assert len(self._on_host) == sum(c.host is not None for c in held)
        assert len(self._on_disk) == sum(c.file is not None for c in held)
        self.rows.check()

    # ---- room ----

    def _free_row(self) -> int | None:
        """A row of the device's region, if need be from the entry that is worth least there."""
        if self.rows.num_rows == 0:
            return None
        if self.rows.num_free == 0:
            worst = self._on_device.worst()
            if worst is None:
                return None
            self._leave_device(worst)
        return self.rows.take()

    def _leave_device(self, entry: Entry, why: Loss = "evicted") -> None:
        copies = self._copies(entry)
        assert copies.row is not None
        if copies.host is None and copies.file is None:
            self._drop(entry, why)
            self.given_up += 1
            return
        self.rows.free(copies.row)
        copies.row = None
        self._on_device.discard(entry)
        self._free_pages(entry)

    def _trim(self) -> None:
        """Bring host and disk back under their budgets."""
        while self.host_bytes > self.budgets.host and (worst := self._on_host.worst()) is not None:
            self._leave_host(worst)
        while self.disk_bytes > self.budgets.disk and (worst := self._on_disk.worst()) is not None:
            self._leave_disk(worst)

    def _leave_host(self, entry: Entry) -> None:
        copies = self._copies(entry)
        assert copies.host is not None
        self.host_bytes -= copies.host.nbytes
        copies.host = None
        self._on_host.discard(entry)
        self._drop_if_nowhere(entry)

    def _leave_disk(self, entry: Entry) -> None:
        copies = self._copies(entry)
        assert copies.file is not None
        self.disk_bytes -= copies.file_bytes
        name, copies.file, copies.file_bytes = copies.file, None, 0
        self._on_disk.discard(entry)
        if self.disk is not None:
            self._do(partial(self.disk.remove, name))
        self._drop_if_nowhere(entry)

    def _drop_if_nowhere(self, entry: Entry) -> None:
        if not self._copies(entry).anywhere:
            self._drop(entry, "evicted")
            self.given_up += 1

    def _drop(self, entry: Entry, why: Loss | None) -> None:
        copies = self._copies(entry)
        if copies.row is not None:
            self.rows.free(copies.row)
            copies.row = None
        for ranking in (self._on_device, self._on_host, self._on_disk):
            ranking.discard(entry)
        if copies.host is not None:
            self.host_bytes -= copies.host.nbytes
            copies.host = None
        if copies.file is not None and self.disk is not None:
            self._do(partial(self.disk.remove, copies.file))
        self.disk_bytes -= copies.file_bytes
        copies.file, copies.file_bytes = None, 0
        self._free_pages(entry)
        later = self.tree.below(entry)
        self.tree.remove(entry, why)
        self._weigh(later)

    def _free_pages(self, entry: Entry) -> None:
        if entry.pages and self._pages is not None:
            self._pages.free(entry.pages)
            entry.pages = ()

    def _rank_anew(self, entry: Entry) -> None:
        self._weigh(self.tree.below(entry))

    def _weigh(self, entries: list[Entry]) -> None:
        for ranking in (self._on_device, self._on_host, self._on_disk):
            ranking.weigh(entries)

    # ---- the way down ----

    def _send_down(self, entry: Entry) -> None:
        copies = self._copies(entry)
        arrived = copies.host is not None or copies.file is not None
        if not self._below or arrived or copies.moving or self._moving >= MOST_MOVING:
            return
        assert copies.row is not None
        copies.moving = True
        entry.pins += 1
        self._moving += 1
        row, event = self.rows.get(copies.row), _mark(self.rows.device)
        packed = entry.packed()  # now: the tree's edges change while the worker works
        self._do(lambda: self._move(entry, packed, row, event))

    def _move(self, entry: Entry, packed: bytes, row: Tensor, event: torch.cuda.Event | None) -> None:
        """In the worker: one copy to the host, and one to the disk from there."""
        saved: SavedState | None = None
        file, nbytes = None, 0
        try:
            with _stream_after(row.device, event):
                saved = self._save(entry, packed, row)
            if self.disk is not None:
                line = self.disk.write(str(entry.space), saved)
                file, nbytes = line.name, line.nbytes
        except Exception as error:  # a full disk must not take the engine with it
            log.warning("a state could not be kept below the device: %s: %s", type(error).__name__, error)
        if self.budgets.host == 0:
            saved = None
        self._arrivals.append(_Arrival(entry, saved, file, nbytes))

    def _save(self, entry: Entry, packed: bytes, row: Tensor) -> SavedState:
        tokens = tuple(unpack(packed))
        pages = () if self._pages is None else self._pages.save(entry.pages)
        pages = tuple(page if page.device.type == "cpu" else _to_host(page) for page in pages)
        return SavedState(self.fingerprint, tokens, len(tokens), _to_host(row), pages)

    def _read(self, entry: Entry, copies: Copies) -> SavedState | None:
        assert copies.file is not None
        assert self.disk is not None
        try:
            return self.disk.read(copies.file, entry.packed())
        except StateError as error:
            log.warning("a saved state is left aside: %s", error)
            self.damaged += 1
            self._drop(entry, "evicted")
            return None

    def _adopt(self, disk: DiskStore) -> None:
        """Enter what an earlier run left."""
        for line in disk.lines():
            entry = self.tree.insert(line.space, line.packed, len(line.packed) // 4)
            entry.nbytes = self.rows.bytes_per_row
            entry.handle = Copies(file=line.name, file_bytes=line.nbytes)
            self.disk_bytes += line.nbytes
            self._on_disk.use(entry)
        self._weigh(list(self.tree))
        self._trim()

    @staticmethod
    def _copies(entry: Entry) -> Copies:
        if entry.handle is None:
            entry.handle = Copies()
        copies: Copies = entry.handle
        return copies

    def _do(self, job: Callable[[], None]) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._serve, name="recurra-states", daemon=True)
            self._worker.start()
        self._work.put(job)

    def _serve(self) -> None:
        while (job := self._work.get()) is not None:
            try:
                job()
            except Exception:
                log.exception("a job of the states' worker failed")
            finally:
                self._work.task_done()
        self._work.task_done()


def _to_host(row: Tensor) -> Tensor:
    """A copy in the host's memory; pinned where a GPU reads it."""
    if row.device.type == "cpu":
        return row.clone()
    host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
    return host.copy_(row)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """The point in the device's queue up to which a row is written."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def _stream_after(device: torch.device, event: torch.cuda.Event | None) -> Iterator[None]:
    """A stream of the worker's own that waits for that point only."""
    if event is None:
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
