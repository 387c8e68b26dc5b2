"""How memory is split between slots and pages."""

from __future__ import annotations

from typing import Any

import pytest

from recurra.config.engine import EngineConfig
from recurra.config.pages import settle_memory
from recurra.device import Device
from recurra.errors import ConfigError

GPU = Device("cuda", 0, "NVIDIA H200", (9, 0), 1, True, False, True)
MIB = 1 << 20


def split(free: int, claimed: int | None = 4096, slot: int = MIB, token: int = 1024, **settings: Any) -> Any:
    config = EngineConfig(model="m", **settings)
    limits, slots, pages = settle_memory(config, GPU, slot, token, free, claimed)
    return limits.max_num_seqs, slots, pages.num_pages, pages.max_model_len


def test_slots_take_up_to_half_and_pages_three_quarters_of_the_rest() -> None:
    seqs, slots, pages, longest = split(200 * MIB)
    assert seqs == slots == 99
    assert pages == int((100 * 16 - 1) * 0.75), "16 pages of 64 tokens a MiB, one is scratch"
    assert longest == 4096


def test_no_more_pages_than_requests_could_fill() -> None:
    assert split(1 << 40, max_num_seqs=4)[2:] == (4 * 64, 4096)
    assert split(1 << 40, max_num_seqs=4, max_model_len=65)[2:] == (4 * 2, 65)


def test_the_longest_request_is_what_the_pages_hold() -> None:
    assert split(10 * MIB, claimed=None, max_num_seqs=2)[3] == split(10 * MIB, None, max_num_seqs=2)[2] * 64
    assert split(10 * MIB, num_kv_pages=3, max_num_seqs=2)[2:] == (3, 192)
    roomy = split(8 * MIB, max_num_seqs=2, max_model_len=79 * 64)
    assert roomy[2:] == (79, 79 * 64), (
        "one request of the asked length fits, whatever is left for kept states"
    )


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len=6000: the 79 pages .* 5056 tokens"):
        split(8 * MIB, max_num_seqs=2, max_model_len=6000)
    with pytest.raises(ConfigError, match=r"num_kv_pages=200: only 79 pages fit"):
        split(8 * MIB, max_num_seqs=2, num_kv_pages=200)
    with pytest.raises(ConfigError, match=r"num_kv_pages=None: no page fits: one takes 65536 bytes"):
        split(3 * MIB, num_state_slots=2)
