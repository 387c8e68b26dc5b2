"""How memory is split between states and pages of keys and values, and how long a request may be with them."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from recurra.config.engine import EngineConfig
from recurra.config.scheduler import DEFAULT_MAX_MODEL_LEN, SchedulerLimits
from recurra.config.settle import settle_slots
from recurra.device import Device
from recurra.errors import ConfigError

log = logging.getLogger("recurra")

#: Of the memory, what slots may take at most where nobody said how many, and pages of what these leave: the rest
#: is for kept states.
_SLOT_SHARE, _PAGE_SHARE = 0.5, 0.75


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Pages of a model with attention.

    Attributes:
        num_pages: beside the scratch page; 0 in a model without attention.
        page_size: tokens of a page; 0 in such a model.
        max_model_len: tokens of the longest request: all pages can hold it.
    """

    num_pages: int
    page_size: int
    max_model_len: int


def settle_memory(
    config: EngineConfig,
    device: Device,
    bytes_per_slot: int,
    bytes_per_token: int,
    free_bytes: int,
    claimed_length: int | None,
) -> tuple[SchedulerLimits, int, PagePlan]:
    """Choose slots, then pages, of a model with attention.

    Slots take up to half of the memory, pages three quarters of what is left, but never more than all slots
    could fill with requests of ``max_model_len``.

    Args:
        bytes_per_slot: one sequence's states over all recurrent layers.
        bytes_per_token: one token's keys and values over all attention layers.
        free_bytes: what both may take beside the weights.
        claimed_length: tokens that the checkpoint claims to handle, or None.

    Returns:
        the scheduler's limits, the number of slots, and the pages.

    Raises:
        ConfigError: a setting asks for more than fits, or nothing fits.
    """
    share = 1.0 if config.num_state_slots is not None else _SLOT_SHARE
    limits, slots = settle_slots(config, device, bytes_per_slot, int(free_bytes * share))
    left = free_bytes - (slots + 1) * bytes_per_slot
    return limits, slots, settle_pages(config, limits, bytes_per_token, left, claimed_length)


def settle_pages(
    config: EngineConfig, limits: SchedulerLimits, bytes_per_token: int, left_bytes: int, claimed: int | None
) -> PagePlan:
    """Choose how many pages there are, and with them how long a request may be.

    Raises:
        ConfigError: no page fits, ``num_kv_pages`` asks for more than fit, or ``max_model_len`` for more tokens
            than all pages hold.
    """
    size = config.block_size
    fit = left_bytes // (size * bytes_per_token) - 1  # one page is scratch
    if fit < 1:
        raise ConfigError(
            "num_kv_pages", config.num_kv_pages,
            f"no page fits: one takes {size * bytes_per_token} bytes (and one more is scratch), "
            f"{max(left_bytes, 0)} are free.",
            "Free memory, use fewer num_state_slots, or raise gpu_memory_utilization.",
        )  # fmt: skip
    if config.num_kv_pages is not None and config.num_kv_pages > fit:
        raise ConfigError(
            "num_kv_pages", config.num_kv_pages, f"only {fit} pages fit.", f"Use at most {fit}."
        )
    longest = config.max_model_len or claimed or DEFAULT_MAX_MODEL_LEN
    useful = limits.max_num_seqs * -(-longest // size)
    pages = config.num_kv_pages or min(max(1, int(fit * _PAGE_SHARE)), useful)
    if config.max_model_len is not None and pages < fit and config.num_kv_pages is None:
        pages = max(pages, min(fit, -(-longest // size)))  # one request of this length must fit
    if pages * size < longest:
        if config.max_model_len is not None:
            raise ConfigError(
                "max_model_len", longest,
                f"the {pages} pages of keys and values hold {pages * size} tokens, and one request can't have "
                "more.",
                f"Use at most {pages * size}, or more num_kv_pages (up to {fit} fit).",
            )  # fmt: skip
        longest = pages * size
    return PagePlan(pages, size, longest)
