"""Whole states widened and rounded on GPUs, for operators that compute on float32 copies of them.

What an operator that touches a state once in many tokens does is cheap beside its own work; the one-token updates
read and write states in place instead (:mod:`recurra.ops.rounding.triton_device`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.rounding import GROUP, NEAREST, SCALED, Rounding
from recurra.ops.rounding.triton_device import (
    draw_arguments,
    draw_origin,
    draw_words,
    half_word,
    load_state,
    state_format,
    state_pointers,
    store_state,
)

_ROWS = 4  # groups of rows of a program


@triton.jit(do_not_specialize_on_alignment=["slots", "has_state"])
def _widen_kernel(
    state,
    scale,
    out,
    slots,
    has_state,
    state_slot,
    scale_slot,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    BR: tl.constexpr,
    BN: tl.constexpr,
):
    blocks: tl.constexpr = (ROWS + BR - 1) // BR
    pid = tl.program_id(0)
    seq = (pid // blocks).to(tl.int64)
    r = (pid % blocks) * BR + tl.arange(0, BR)
    n = tl.arange(0, BN)
    r_ok = r < ROWS
    ok = r_ok[:, None] & (n < N)[None, :]
    slot = tl.load(slots + seq).to(tl.int64)
    kept = tl.load(has_state + seq).to(tl.int1)
    inner = r[:, None] * N + n[None, :]
    at = state + slot * state_slot + inner
    value = load_state(at, ok & kept, scale + slot * scale_slot + r, r_ok & kept, FORMAT)
    tl.store(out + seq * (ROWS * N) + inner, value, mask=ok)


@triton.jit(do_not_specialize=["layer"], do_not_specialize_on_alignment=["slots", "cu_seqlens"])
def _store_kernel(
    value,
    state,
    scale,
    slots,
    cu_seqlens,
    seed,
    step,
    layer,
    state_slot,
    scale_slot,
    H: tl.constexpr,
    R: tl.constexpr,
    N: tl.constexpr,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ROUNDS: tl.constexpr,
    BG: tl.constexpr,
    BN: tl.constexpr,
):
    groups: tl.constexpr = (R + 7) // 8
    blocks: tl.constexpr = (groups + BG - 1) // BG
    pid = tl.program_id(0)
    seq = (pid // (blocks * H)).to(tl.int64)
    h = (pid // blocks) % H
    g = (pid % blocks) * BG + tl.arange(0, BG)
    n = tl.arange(0, BN)
    if tl.load(cu_seqlens + seq) == tl.load(cu_seqlens + seq + 1):
        return
    slot = tl.load(slots + seq).to(tl.int64)
    if slot == 0:  # padding: nobody reads it
        return
    source = value + (seq * H + h) * (R * N)
    target = state + slot * state_slot + h * (R * N)
    scales = scale + slot * scale_slot + h * R
    words = (g, g, g, g)
    if STOCHASTIC:
        origin = draw_origin(seed, step, slot, layer)
        words = draw_words((h * groups + g)[:, None] * N + n[None, :], origin, ROUNDS)
    for j in tl.static_range(8):
        r = g * 8 + j
        r_ok = r < R
        ok = r_ok[:, None] & (n < N)[None, :]
        inner = r[:, None] * N + n[None, :]
        tile = tl.load(source + inner, mask=ok, other=0.0)
        noise = half_word(words, j) if STOCHASTIC else j
        store_state(target + inner, ok, scales + r, r_ok, tile, noise, FORMAT, STOCHASTIC)


def _warps(elements: int) -> int:
    return max(1, min(8, elements // 512))


def widen_states(state: Tensor, scale: Tensor | None, slots: Tensor, has_state: Tensor) -> Tensor:
    """States by slot as a float32 copy, (S, ..., R, N), zeros where there is none."""
    narrow, scales, scale_slot = state_pointers(state, scale)
    shape, size = state.shape[1:], state.shape[-1]
    assert state[0].is_contiguous(), state.stride()
    out = torch.empty((slots.shape[0], *shape), dtype=torch.float32, device=state.device)
    rows, block = math.prod(shape[:-1]), GROUP * _ROWS
    if out.numel() == 0:
        return out
    columns = triton.next_power_of_2(size)
    with torch.cuda.device_of(state):
        _widen_kernel[(slots.shape[0] * triton.cdiv(rows, block),)](
            narrow, scales, out, slots, has_state, state.stride(0), scale_slot,
            ROWS=rows, N=size, FORMAT=state_format(state), BR=block, BN=columns,
            num_warps=_warps(block * columns),
        )  # fmt: skip
    return out


def store_states(
    state: Tensor, scale: Tensor | None, slots: Tensor, value: Tensor, cu_seqlens: Tensor, rounding: Rounding
) -> None:
    """Round a float32 copy of states back into their slots; sequences without a token change nothing.

    Args:
        value: (S, ..., R, N) contiguous.
    """
    narrow, scales, scale_slot = state_pointers(state, scale)
    shape = state.shape[1:]
    rows, size = shape[-2:]
    assert state[0].is_contiguous(), state.stride()
    assert value.is_contiguous(), value.stride()
    heads, columns = math.prod(shape[:-2]), triton.next_power_of_2(size)
    if value.numel() == 0:
        return
    with torch.cuda.device_of(state):
        _store_kernel[(slots.shape[0] * heads * triton.cdiv(triton.cdiv(rows, GROUP), _ROWS),)](
            value, narrow, scales, slots, cu_seqlens, *draw_arguments(rounding, state), state.stride(0),
            scale_slot, H=heads, R=rows, N=size, FORMAT=state_format(state), STOCHASTIC=rounding.stochastic,
            ROUNDS=rounding.rounds, BG=_ROWS, BN=columns, num_warps=_warps(_ROWS * columns),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class States:
    """States that kernels address as plain rows by slot; ``commit`` rounds them back when they are copies."""

    rows: Tensor
    slots: Tensor
    target: Tensor
    scale: Tensor | None
    target_slots: Tensor
    rounding: Rounding

    def commit(self, cu_seqlens: Tensor | None) -> None:
        """Write the copies' content to the states; sequences without a token are left alone.

        Args:
            cu_seqlens: None: every sequence has tokens.
        """
        if self.rows is self.target:
            return
        if cu_seqlens is None:
            cu_seqlens = torch.arange(self.slots.shape[0] + 1, dtype=torch.int32, device=self.slots.device)
        store_states(self.target, self.scale, self.target_slots, self.rows, cu_seqlens, self.rounding)


def plain_states(
    state: Tensor,
    scale: Tensor | None,
    slots: Tensor,
    has_state: Tensor | None,
    rounding: Rounding = NEAREST,
) -> States:
    """The states themselves where a kernel's own conversion is right, else a float32 copy of them.

    Args:
        has_state: (S,) bool, whose slots may be read; None: all.

    Raises:
        ConfigError: a dtype that states aren't kept in.
    """
    by_chance = rounding.stochastic and state.dtype.itemsize < 4
    if state.dtype not in SCALED and not by_chance:
        state_pointers(state, scale)
        return States(state, slots, state, scale, slots, rounding)
    if has_state is None:
        has_state = torch.ones(slots.shape[0], dtype=torch.bool, device=slots.device)
    rows = widen_states(state, scale, slots, has_state)
    near = torch.arange(slots.shape[0], dtype=torch.int32, device=slots.device)
    return States(rows, near, state, scale, slots, rounding)
