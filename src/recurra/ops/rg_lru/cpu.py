"""The real-gated linear recurrent unit on the CPU: a unit of work is 64 channels of one sequence.

16 channels are a vector; their state stays in a register down the tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurra.ops.cpu.calls import as_float32, row_bytes, run, table, threads_for, unit_rows
from recurra.ops.cpu.jit import declare, instruction, kernel
from recurra.ops.cpu.maths import exp
from recurra.ops.cpu.subnormals import flush_subnormals, restore_mode
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import (
    LANES,
    add,
    div,
    f32x16,
    fma,
    mul,
    slot_at,
    splat,
    sub,
    vec,
    where_less,
    word,
)
from recurra.ops.rg_lru import check_shapes
from recurra.ops.rounding import NEAREST, Rounding
from recurra.ops.rounding.cpu import plain_states
from recurra.types import Chunks

_BLOCK = 64  # channels of a unit


@instruction(f32x16, (f32x16,))
def root(builder: Any, value: Any) -> Any:
    """The square root of each lane."""
    return builder.call(declare(builder, "llvm.sqrt.v16f32", vec, [vec]), [value])


@kernel
def _sigmoid(x: Any) -> Any:
    return div(splat(1.0), add(splat(1.0), exp(sub(splat(0.0), x))))


@kernel
def _below_one(u: Any) -> Any:
    """1 - e^u for u <= 0, to the last bits near 0 too: by its series, whose rest is below 2^-27 for u > -1/2."""
    p = fma(splat(1.0 / 40320.0), u, splat(1.0 / 5040.0))
    p = fma(p, u, splat(1.0 / 720.0))
    p = fma(p, u, splat(1.0 / 120.0))
    p = fma(p, u, splat(1.0 / 24.0))
    p = fma(p, u, splat(1.0 / 6.0))
    p = fma(p, u, splat(0.5))
    p = fma(p, u, splat(1.0))
    near = sub(splat(0.0), mul(p, u))
    return where_less(u, splat(-0.5), sub(splat(1.0), exp(u)), near)


@kernel
def _walk(
    state: int, x: int, x_row: int, gate: int, gate_row: int, recur: int, recur_row: int, rate: int, y: int,
    y_row: int, tokens: int, fresh: int, some: int,
) -> None:  # fmt: skip
    """Up to 16 channels of one sequence."""
    log_decay, carried, first = load_some(rate, some), splat(0.0), 0
    if fresh:
        carried, first = mul(_sigmoid(load_some(gate, some)), load_some(x, some)), 1
        store_some(y, carried, some)
    else:
        carried = load_some(state, some)
    for t in range(first, tokens):
        log_a = mul(log_decay, _sigmoid(load_some(recur + t * recur_row, some)))
        gated = mul(_sigmoid(load_some(gate + t * gate_row, some)), load_some(x + t * x_row, some))
        gain = mul(root(_below_one(add(log_a, log_a))), gated)
        carried = fma(exp(log_a), carried, gain)
        store_some(y + t * y_row, carried, some)
    store_some(state, carried, some)


@kernel
def _unit(args: int, s: int, first: int) -> None:
    """64 channels of sequence s: words as :func:`_run` lays them."""
    channels, begin = word(args, 2), slot_at(word(args, 3), s)
    tokens, y_row = slot_at(word(args, 3), s + 1) - begin, 4 * channels
    slot = slot_at(word(args, 4), s)
    if tokens <= 0:
        return
    y = word(args, 14) + begin * y_row
    for c in range(first, min(first + _BLOCK, channels), LANES):
        some = channels - c
        if word(args, 15) and slot_at(word(args, 15), s) == 0:
            store_some(y + 4 * c, splat(0.0), some)
            continue
        _walk(
            word(args, 5) + slot * word(args, 6) + 4 * c,
            word(args, 7) + begin * word(args, 8) + 4 * c, word(args, 8),
            word(args, 9) + begin * word(args, 10) + 4 * c, word(args, 10),
            word(args, 11) + begin * word(args, 12) + 4 * c, word(args, 12),
            word(args, 13) + 4 * c, y + 4 * c, y_row, tokens, 1 - slot_at(word(args, 16), s), some,
        )  # fmt: skip


def _job(args: int, control: int, rank: int) -> None:
    mode, blocks = flush_subnormals(), word(args, 1)
    while True:
        unit = claim(control)
        if unit >= word(args, 0):
            break
        _unit(args, unit // blocks, unit % blocks * _BLOCK)
    restore_mode(mode)


def _run(
    inputs: tuple[Tensor, Tensor, Tensor],
    log_decay: Tensor,
    state: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    padding: Tensor | None,
    stored: tuple[Tensor | None, Rounding],
) -> Tensor:
    """Sequences ``where`` = (cu_seqlens, slots, has_state); ``padding``: slots whose 0 gives zeros and no more."""
    bounds, slots, known = (t.to(torch.int32).contiguous() for t in where)
    states = plain_states(state, stored[0], slots, stored[1])
    x, gate, recur = (unit_rows(t, name) for t, name in zip(inputs, _NAMES, strict=True))
    rates = as_float32(log_decay, "log_decay").contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    channels = x.shape[1]
    blocks = -(-channels // _BLOCK)
    units = slots.shape[0] * blocks
    words = table(
        units, blocks, channels, bounds.data_ptr(), states.slots.data_ptr(), states.rows.data_ptr(),
        row_bytes(states.rows), x.data_ptr(), row_bytes(x), gate.data_ptr(), row_bytes(gate), recur.data_ptr(),
        row_bytes(recur), rates.data_ptr(), out.data_ptr(), 0 if padding is None else padding.data_ptr(),
        known.data_ptr(),
    )  # fmt: skip
    run(_job, words, threads_for(units))
    states.commit(bounds)
    return out.to(inputs[0].dtype)


_NAMES = ("x", "input_gate", "recurrent_gate")


def rg_lru_varlen(
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    log_decay: Tensor,
    state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.rg_lru.RGLRUVarlen`.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    del chunks  # a sequence is walked whole
    check_shapes(x, input_gate, recurrent_gate, log_decay, state)
    where = (cu_seqlens, slots, has_state)
    return _run((x, input_gate, recurrent_gate), log_decay, state, where, None, (state_scale, rounding))


def rg_lru_update(
    state: Tensor,
    x: Tensor,
    input_gate: Tensor,
    recurrent_gate: Tensor,
    log_decay: Tensor,
    slots: Tensor,
    *,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """See :class:`recurra.ops.rg_lru.RGLRUUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: inputs that aren't float32, bfloat16 or float16, or states in a dtype that they aren't kept in.
    """
    check_shapes(x, input_gate, recurrent_gate, log_decay, state)
    rows = torch.arange(x.shape[0] + 1, dtype=torch.int32)
    given = slots.to(torch.int32).contiguous()
    where = (rows, given, torch.ones(x.shape[0], dtype=torch.int32))
    return _run((x, input_gate, recurrent_gate), log_decay, state, where, given, (state_scale, rounding))
