"""Puts the prefix cache of an engine together."""

from __future__ import annotations

from collections.abc import Sequence as PythonSequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from recurra.cache.disk import DiskStore
from recurra.cache.pages import PagePool, page_bytes
from recurra.cache.pool import StatePool
from recurra.cache.prefix import Entry, PrefixTree
from recurra.cache.snapshots import SnapshotPool
from recurra.cache.store import Budgets, Tiers
from recurra.config.engine import EngineConfig
from recurra.engine.fingerprint import fingerprint
from recurra.engine.paging import Paging
from recurra.engine.reuse import REASONS, PrefixReuse
from recurra.engine.runner import SavedState
from recurra.errors import ConfigError
from recurra.models import CausalLM
from recurra.types import Sequence


@dataclass(frozen=True, slots=True)
class KeptPages:
    """Pages of keys and values that entries hold beside the sequences."""

    pool: PagePool
    paging: Paging

    def save(self, pages: PythonSequence[int]) -> tuple[Tensor, ...]:
        """Copies of some pages."""
        return tuple(self.pool.save(pages))

    def free(self, pages: PythonSequence[int]) -> None:
        """Let go of an entry's pages."""
        self.paging.allocator.free(pages)

    def hold(self, entry: Entry, pages: PythonSequence[int]) -> None:
        """Have an entry hold a sequence's pages up to its position. The sequence goes on in the last one, after
        what the entry needs of it."""
        if not entry.pages:
            entry.pages = tuple(pages[: self.paging.allocator.pages_for(entry.position)])
            self.paging.allocator.share(entry.pages)

    def nbytes(self, tokens: int) -> int:
        """Of so many tokens' pages."""
        return self.paging.allocator.pages_for(tokens) * page_bytes(self.pool.specs, self.pool.page_size)

    def begin(
        self, entry: Entry, sequence: Sequence, row: Tensor, saved: tuple[Tensor, ...]
    ) -> SavedState | None:
        """Give a sequence an entry's pages: full ones shared, the last one copied, all copied if ``saved``.

        Returns:
            None: pages for the copies and the next token can't be had.
        """
        allocator, position = self.paging.allocator, entry.position
        whole, rest = divmod(position, allocator.page_size)
        full = () if saved else entry.pages[:whole]
        fresh = allocator.pages_for(position + 1) - len(full)
        entry.pins += 1  # making room must not take it
        found = self.paging.can_have(fresh, self.paging.reserve)
        entry.pins -= 1
        if not found:
            return None
        allocator.share(full)
        sequence.pages = [*full, *allocator.allocate(fresh)]
        if saved:
            return SavedState(row, list(saved))
        return SavedState(row, self.pool.save([entry.pages[whole]]) if rest else [], whole)


@dataclass(frozen=True, slots=True)
class PoolShelf:
    """Kept states of a state pool, and of a page pool where there is attention."""

    tiers: Tiers
    pool: StatePool
    pages: KeptPages | None

    @torch.inference_mode()
    def keep(self, entry: Entry, sequence: Sequence) -> bool:
        """Copy a slot, and hold its pages."""
        if self.pages is None:
            return self.tiers.keep(entry, self.pool.rows[sequence.slot])
        self.pages.hold(entry, sequence.pages)
        return self.tiers.keep(entry, self.pool.rows[sequence.slot], self.pages.nbytes(entry.saved))

    @torch.inference_mode()
    def begin(self, entry: Entry, sequence: Sequence) -> Tensor | SavedState | None:
        """What the runner copies into the slot and the pages: what is kept never changes."""
        found = self.tiers.fetch(entry)
        if found is None or self.pages is None:
            return None if found is None else found[0]
        return self.pages.begin(entry, sequence, *found)

    @torch.inference_mode()
    def load(self, entry: Entry, row: Tensor, pages: tuple[Tensor, ...]) -> bool:
        """Keep a state that comes from outside; False: there is no room."""
        if self.pages is None:
            return self.tiers.keep(entry, row)
        if not entry.pages:
            count = self.pages.paging.allocator.pages_for(entry.position)
            if not self.pages.paging.can_have(count):
                return self.tiers.refuse(entry)
            entry.pages = tuple(self.pages.paging.allocator.allocate(count))
            self.pages.pool.restore(entry.pages, list(pages))
        return self.tiers.keep(entry, row, self.pages.nbytes(entry.saved))

    def reclaim(self, pages: int) -> None:
        """Give entries up until so many more pages are free, or nobody can go."""
        assert self.pages is not None
        wanted = self.pages.paging.allocator.num_free + pages
        while self.pages.paging.allocator.num_free < wanted and self.tiers.make_way():
            pass

    def use(self, entry: Entry) -> None:
        """Note a use."""
        self.tiers.use(entry)

    def drop(self, entry: Entry, why: Literal["evicted", "pages_gone"]) -> None:
        """Give an entry up."""
        self.tiers.drop(entry, why)


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The parts of a cache that works.

    Attributes:
        reuse: what the scheduler asks.
        shelf: what it asks in turn.
        tiers: where the states are.
        fingerprint: of the model whose states they are.
    """

    reuse: PrefixReuse
    shelf: PoolShelf
    tiers: Tiers
    fingerprint: str


def make_cache(
    config: EngineConfig,
    model: CausalLM,
    weight_dtype: torch.dtype,
    pool: StatePool,
    num_rows: int,
    page_pool: PagePool,
    paging: Paging,
) -> PrefixCache | None:
    """The cache that the settings ask for; None: it is off, or has no room.

    Args:
        num_rows: states that the device's region holds.
        page_pool, paging: keys and values, and who holds them; ``paging`` gets its way to ask for pages back.

    Raises:
        ConfigError: the folder for states can't be used, or a budget holds no state.
    """
    if not config.enable_prefix_caching or num_rows == 0:
        return None
    device, row = pool.rows.device, pool.bytes_per_slot
    name = fingerprint(
        Path(config.model),
        model.state_specs,
        weight_dtype,
        config.load_format,
        config.seed,
        page_pool.page_size,
    )
    pages = KeptPages(page_pool, paging) if paging.is_used else None
    tree = PrefixTree()
    disk = None
    if config.prefix_cache_dir is not None:
        _check_budget("prefix_cache_disk_bytes", config.prefix_cache_disk_bytes, row)
        disk = DiskStore(Path(config.prefix_cache_dir), name, row)
    host = _host_bytes(config.prefix_cache_host_bytes, device, row)
    budgets = Budgets(host, config.prefix_cache_disk_bytes)
    tiers = Tiers(tree, SnapshotPool(row, num_rows, device), name, budgets, disk, pages)
    shelf = PoolShelf(tiers, pool, pages)
    if pages is not None:
        paging.reclaim = shelf.reclaim
    return PrefixCache(PrefixReuse(tree, shelf, config.prefix_cache_interval), shelf, tiers, name)


def _check_budget(setting: str, value: int, row: int) -> None:
    if value < row:
        raise ConfigError(
            setting, value, f"it holds no state: one takes {row} bytes.", f"Use {row} or (much) more."
        )


def _host_bytes(asked: int | None, device: torch.device, row: int) -> int:
    if device.type == "cpu":
        if asked:
            raise ConfigError(
                "prefix_cache_host_bytes", asked, "on a CPU all states are in the host's memory already.",
                "Use prefix_cache_bytes.",
            )  # fmt: skip
        return 0
    if asked:
        _check_budget("prefix_cache_host_bytes", asked, row)
    return _DEFAULT_HOST_BYTES if asked is None else asked


#: Of pinned memory behind a GPU.
_DEFAULT_HOST_BYTES = 4 << 30


def cache_numbers(cache: PrefixCache | None) -> dict[str, Any]:
    """Fields of :class:`recurra.engine.metrics.EngineStats`."""
    if cache is None:
        return {"cached_tokens": 0}
    stats, tiers = cache.reuse.stats, cache.tiers
    return {
        "cached_tokens": stats.cached_tokens,
        "kept_states": cache.reuse.tree.num_entries,
        "device_state_bytes": tiers.rows.num_used * tiers.rows.bytes_per_row,
        "host_state_bytes": tiers.host_bytes,
        "disk_state_bytes": tiers.disk_bytes,
        "states_given_up": tiers.given_up,
        "states_damaged": tiers.damaged,
        **{f"prefix_{reason}": stats.reasons[reason] for reason in REASONS},
    }
