"""States by slot on the CPU: float32 ones as they are, narrower ones as float32 copies that are rounded back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from recurra.ops.cpu.calls import row_bytes, run, table, threads_for
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.subnormals import flush_subnormals, restore_mode
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.vectors import BF16, F16, F32, slot_at, word
from recurra.ops.rounding import GROUP, NEAREST, SCALED, Rounding, check_state
from recurra.ops.rounding.cpu_rows import (
    FP8,
    INT8,
    addresses,
    call_close,
    call_open,
    element_bytes,
)
from recurra.types import SCRATCH_SLOT

KINDS = {
    torch.float32: F32,
    torch.bfloat16: BF16,
    torch.float16: F16,
    torch.float8_e4m3fn: FP8,
    torch.int8: INT8,
}
_BLOCK = 64  # rows of a unit, in whole groups
_WORD = 0xFFFFFFFF


def chance_words(rounding: Rounding) -> Tensor:
    """The table by which kernels round at this step (see ``cpu_rows.ROUNDS``)."""
    if not rounding.stochastic:
        return table(0, 0, 0, 0, 0)
    seed, step = int(rounding.seed), int(rounding.step)
    layer = rounding.layer | ((step >> 32) & 0xFFFF) << 16
    return table(rounding.rounds, seed & _WORD, (seed >> 32) & _WORD, step & _WORD, layer)


def stored_words(state: Tensor, scale: Tensor | None, chance: Tensor) -> Tensor:
    """What kernels must know of a state to read and write it a few rows at a time (see ``cpu_rows.KIND``).

    Args:
        chance: from :func:`chance_words`; it must live as long as the table.

    Raises:
        ConfigError: states in a dtype that they aren't kept in.
    """
    check_state(state, scale)
    assert state[0].is_contiguous(), state.stride()
    return table(KINDS[state.dtype], *addresses(), chance.data_ptr(), *_scales(state, scale))


@kernel
def _open_unit(args: int, unit: int) -> None:
    kind, rows, N, blocks = word(args, 1), word(args, 2), word(args, 3), word(args, 4)
    s, first = unit // blocks, unit % blocks * _BLOCK
    slot, count = slot_at(word(args, 9), s), min(_BLOCK, rows - first)
    state = word(args, 5) + slot * word(args, 6) + element_bytes(kind) * first * N
    scale = word(args, 7) + slot * word(args, 8) + 2 * first
    call_open(word(args, 11), kind, state, scale, count, N, word(args, 10) + 4 * (s * rows + first) * N)


def _open_job(args: int, control: int, rank: int) -> None:
    mode = flush_subnormals()
    while True:
        unit = claim(control)
        if unit >= word(args, 0):
            break
        _open_unit(args, unit)
    restore_mode(mode)


@kernel
def _close_unit(args: int, unit: int, spare: int) -> None:
    kind, heads, rows, N, blocks = word(args, 1), word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    s, h, first = unit // (heads * blocks), unit // blocks % heads, unit % blocks * _BLOCK
    bounds = word(args, 12)
    if slot_at(bounds, s) == slot_at(bounds, s + 1):
        return
    slot, count = slot_at(word(args, 10), s), min(_BLOCK, rows - first)
    if slot == 0:  # padding: nobody reads it
        return
    row = h * rows + first
    state = word(args, 6) + slot * word(args, 7) + element_bytes(kind) * row * N
    scale = word(args, 8) + slot * word(args, 9) + 2 * row
    place = (h * ((rows + 7) // 8) + first // 8) * N
    source = word(args, 11) + 4 * (s * heads * rows + row) * N
    call_close(
        word(args, 14), kind, state, scale, count, N, source, word(args, 13), slot, place, spare
    )  # fmt: skip


def _close_job(args: int, control: int, rank: int) -> None:
    mode = flush_subnormals()
    while True:
        unit = claim(control)
        if unit >= word(args, 0):
            break
        _close_unit(args, unit, word(args, 15) + rank * 128)
    restore_mode(mode)


@dataclass(frozen=True, slots=True)
class States:
    """States that kernels address as float32 rows by slot; ``commit`` rounds them back when they are copies."""

    rows: Tensor
    slots: Tensor  # int32, rows of ``rows``
    target: Tensor
    scale: Tensor | None
    target_slots: Tensor
    rounding: Rounding

    def commit(self, cu_seqlens: Tensor) -> None:
        """Write the copies' content to the states; sequences without a token are left alone."""
        if self.rows is self.target:
            return
        if not self.target[0].is_contiguous():
            kept = (cu_seqlens.diff() > 0) & (self.target_slots > SCRATCH_SLOT)
            self.target[self.target_slots[kept].long()] = self.rows[kept]
        else:
            bounds = cu_seqlens.to(torch.int32).contiguous()
            store_states(self.target, self.scale, self.target_slots, self.rows, bounds, self.rounding)


def _scales(state: Tensor, scale: Tensor | None) -> tuple[int, int]:
    if scale is None or state.dtype not in SCALED:
        return 0, 0
    assert scale[0].is_contiguous(), scale.stride()
    return scale.data_ptr(), row_bytes(scale)


def widen_states(state: Tensor, scale: Tensor | None, slots: Tensor) -> Tensor:
    """States by slot as a float32 copy: (S, ..., R, N). Slots (S,) int32."""
    rows, size = math.prod(state.shape[1:-1]), state.shape[-1]
    out = torch.empty((slots.shape[0], *state.shape[1:]), dtype=torch.float32)
    blocks = -(-rows // _BLOCK)
    units = slots.shape[0] * blocks
    words = table(
        units, KINDS[state.dtype], rows, size, blocks, state.data_ptr(), row_bytes(state),
        *_scales(state, scale), slots.data_ptr(), out.data_ptr(), addresses()[0],
    )  # fmt: skip
    run(_open_job, words, threads_for(units))
    return out


def store_states(
    state: Tensor, scale: Tensor | None, slots: Tensor, value: Tensor, cu_seqlens: Tensor, rounding: Rounding
) -> None:
    """Round a contiguous float32 copy (S, ..., R, N) into its slots; sequences without a token change nothing.

    Slots (S,) and cu_seqlens (S + 1,) are int32.
    """
    heads, (rows, size) = math.prod(state.shape[1:-2]), state.shape[-2:]
    blocks = -(-rows // _BLOCK)
    units = slots.shape[0] * heads * blocks
    threads = threads_for(units)
    spare, chance = torch.empty(threads, 4 * GROUP), chance_words(rounding)
    words = table(
        units, KINDS[state.dtype], heads, rows, size, blocks, state.data_ptr(), row_bytes(state),
        *_scales(state, scale), slots.data_ptr(), value.data_ptr(), cu_seqlens.data_ptr(), chance.data_ptr(),
        addresses()[1], spare.data_ptr(),
    )  # fmt: skip
    run(_close_job, words, threads)


def plain_states(state: Tensor, scale: Tensor | None, slots: Tensor, rounding: Rounding = NEAREST) -> States:
    """Float32 states in place; narrower ones widened into a copy that is rounded once, at the end.

    Float32 states that are not contiguous within a slot are copied too, and copied back.

    Raises:
        ConfigError: states in a dtype that they aren't kept in.
    """
    check_state(state, scale)
    slots = slots.to(torch.int32).contiguous()
    if state.dtype == torch.float32 and state[0].is_contiguous():
        return States(state, slots, state, scale, slots, rounding)
    near = torch.arange(slots.shape[0], dtype=torch.int32)
    if state.dtype == torch.float32:  # rows that kernels can't walk
        return States(state[slots.long()].contiguous(), near, state, scale, slots, rounding)
    assert state[0].is_contiguous(), state.stride()
    return States(widen_states(state, scale, slots), near, state, scale, slots, rounding)
