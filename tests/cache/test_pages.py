"""The page pool: what is saved comes back in any pages, and nothing else changes."""

from __future__ import annotations

import torch

from recurra.cache.pages import PagePool, page_bytes, pages_for
from recurra.cache.spec import KVSpec, StateSpec, join_layers, paged, recurrent, short_conv_state

SPECS = (KVSpec(2, 6, 4, torch.float32), KVSpec(1, 8, 8, torch.bfloat16, window=5))


def _pool() -> PagePool:
    pool = PagePool(SPECS, 6, 4, torch.device("cpu"))
    for layer in pool.layers:
        for tensor in layer:
            tensor.normal_()
    return pool


def test_shapes_and_bytes() -> None:
    pool = _pool()
    assert [tuple(t.shape) for layer in pool.layers for t in layer] == [
        (7, 4, 2, 6), (7, 4, 2, 4), (7, 4, 1, 8), (7, 4, 1, 8),
    ]  # fmt: skip
    assert page_bytes(SPECS, 4) == 4 * (2 * 10 * 4 + 16 * 2)
    held = sum(t[0].numel() * t.element_size() for layer in pool.layers for t in layer)
    assert held == page_bytes(SPECS, 4)
    assert [pages_for(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_saved_pages_come_back_elsewhere() -> None:
    pool = _pool()
    before = [t.clone() for layer in pool.layers for t in layer]
    saved = pool.save([5, 2])
    for layer in pool.layers:
        for tensor in layer:
            tensor[[5, 2]] = float("nan")
    pool.restore([1, 6], saved)
    for tensor, old in zip((t for layer in pool.layers for t in layer), before, strict=True):
        assert torch.equal(tensor[[1, 6]], old[[5, 2]])
        assert torch.equal(tensor[[0, 3, 4]], old[[0, 3, 4]])
    pool.copy(1, 3)
    pool.layers[0].k[1] = 0
    assert torch.equal(pool.layers[0].k[3], before[0][5])


def test_views_of_both_pools_come_in_the_order_of_the_mixers() -> None:
    state = short_conv_state(3, 4, torch.float32)
    specs = (SPECS[0], state, SPECS[1])
    assert recurrent(specs) == (state,)
    assert paged(specs) == SPECS
    pool = _pool()
    marker: StateSpec = state
    views = join_layers(specs, (marker,), pool.layers)  # type: ignore[arg-type]
    assert views == (pool.layers[0], marker, pool.layers[1])


def test_a_model_without_attention_has_no_pages() -> None:
    pool = PagePool((), 0, 0, torch.device("cpu"))
    assert pool.layers == ()
    assert pool.save([]) == []
