"""Slots and pages: each in the hands that took it, none invented, none lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.cache.alloc import PageAllocator, SlotAllocator
from recurra.types import SCRATCH_PAGE, SCRATCH_SLOT


def test_all_slots_but_the_scratch_slot_are_handed_out_once() -> None:
    slots = SlotAllocator(3)
    taken = [slots.allocate() for _ in range(3)]
    assert sorted(taken) == [1, 2, 3]
    assert SCRATCH_SLOT not in taken
    assert (slots.num_free, slots.num_used) == (0, 3)
    with pytest.raises(AssertionError, match="no slot is free"):
        slots.allocate()


def test_freeing_twice_and_freeing_what_was_never_taken_are_bugs() -> None:
    slots = SlotAllocator(2)
    slot = slots.allocate()
    slots.free(slot)
    for wrong in (slot, SCRATCH_SLOT, 3, -1):
        with pytest.raises(AssertionError, match="not in use"):
            slots.free(wrong)
    slots.check()


@given(st.lists(st.integers(0, 9), max_size=60))
def test_any_order_of_taking_and_giving_back_keeps_every_slot(moves: list[int]) -> None:
    slots, held = SlotAllocator(4), []
    for move in moves:
        if move < 6 and slots.num_free:
            held.append(slots.allocate())
        elif held:
            slots.free(held.pop(move % len(held)))
        slots.check()
        assert len(set(held)) == len(held) == slots.num_used


def test_a_page_is_free_when_its_last_holder_lets_go() -> None:
    pages = PageAllocator(4, 16)
    mine = pages.allocate(3)
    assert SCRATCH_PAGE not in mine
    pages.share(mine[:2])
    pages.free(mine)
    assert (pages.num_free, pages.num_used) == (2, 2)
    pages.check()
    with pytest.raises(AssertionError, match="not in use"):
        pages.free(mine[2:])
    with pytest.raises(AssertionError, match="not in use"):
        pages.share(mine[2:])
    with pytest.raises(AssertionError, match="pages are out"):
        pages.allocate(3)
    pages.free(mine[:2])
    assert pages.num_free == 4
    assert [pages.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert PageAllocator(0, 0).pages_for(1000) == 0


@given(st.lists(st.integers(0, 99), max_size=80))
def test_any_order_of_taking_sharing_and_letting_go_keeps_every_page(moves: list[int]) -> None:
    pages, held = PageAllocator(6, 1), []
    for move in moves:
        if move % 3 == 0 and pages.num_free >= move % 4:
            held += [[page] for page in pages.allocate(move % 4)]
        elif move % 3 == 1 and held:
            pages.share(held[move % len(held)])
            held.append(held[move % len(held)])
        elif held:
            pages.free(held.pop(move % len(held)))
        pages.check()
        assert {page for holding in held for page in holding} == set(pages._holders)
