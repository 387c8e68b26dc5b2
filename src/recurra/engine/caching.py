"""Puts the prefix cache of an engine together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from recurra.cache.disk import DiskStore
from recurra.cache.pool import StatePool
from recurra.cache.prefix import Entry, PrefixTree
from recurra.cache.snapshots import SnapshotPool
from recurra.cache.store import Budgets, Tiers
from recurra.config.engine import EngineConfig
from recurra.engine.fingerprint import fingerprint
from recurra.engine.reuse import REASONS, PrefixReuse
from recurra.errors import ConfigError
from recurra.models import CausalLM
from recurra.types import Sequence


@dataclass(frozen=True, slots=True)
class PoolShelf:
    """Kept states of a state pool."""

    tiers: Tiers
    pool: StatePool

    @torch.inference_mode()
    def keep(self, entry: Entry, sequence: Sequence) -> bool:
        """Copy a slot."""
        return self.tiers.keep(entry, self.pool.rows[sequence.slot])

    @torch.inference_mode()
    def fetch(self, entry: Entry) -> Tensor | None:
        """A row for :meth:`StatePool.restore`, which copies it: what is kept never changes."""
        found = self.tiers.fetch(entry)
        return None if found is None else found[0]

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
        tiers: where the states are.
        fingerprint: of the model whose states they are.
    """

    reuse: PrefixReuse
    tiers: Tiers
    fingerprint: str


def make_cache(
    config: EngineConfig, model: CausalLM, weight_dtype: torch.dtype, pool: StatePool, num_rows: int
) -> PrefixCache | None:
    """The cache that the settings ask for; None: it is off, or has no room.

    Args:
        num_rows: states that the device's region holds.

    Raises:
        ConfigError: the folder for states can't be used, or a budget holds no state.
    """
    if not config.enable_prefix_caching or num_rows == 0:
        return None
    device, row = pool.rows.device, pool.bytes_per_slot
    name = fingerprint(Path(config.model), model.state_specs, weight_dtype, config.load_format, config.seed)
    tree = PrefixTree()
    disk = None
    if config.prefix_cache_dir is not None:
        _check_budget("prefix_cache_disk_bytes", config.prefix_cache_disk_bytes, row)
        disk = DiskStore(Path(config.prefix_cache_dir), name, row)
    host = _host_bytes(config.prefix_cache_host_bytes, device, row)
    budgets = Budgets(host, config.prefix_cache_disk_bytes)
    tiers = Tiers(tree, SnapshotPool(row, num_rows, device), name, budgets, disk)
    reuse = PrefixReuse(tree, PoolShelf(tiers, pool), config.prefix_cache_interval)
    return PrefixCache(reuse, tiers, name)


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
