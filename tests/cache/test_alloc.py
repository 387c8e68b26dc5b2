"""Slots: each in one hand, none invented, none lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recurra.cache.alloc import SlotAllocator
from recurra.types import SCRATCH_SLOT


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
