"""The causal convolution over packed sequences on the CPU: one pass, a unit of work a block of channels."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.cpu.calls import (
    address,
    as_float32,
    row_bytes,
    run,
    states_by_slot,
    table,
    threads_for,
    unit_rows,
)
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.maths import silu as silu_of
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import LANES, fma, get, put, slot_at, splat, word
from recurra.types import Chunks

_BLOCK = 128  # channels of a unit: half a kilobyte of each row, so that memory streams
_MAX_WIDTH = 8
_ROW = 4 * _BLOCK


@kernel
def _open_window(window: int, state: int, taps: int, width: int, known: int) -> None:
    """Copy a block's stored window to ``taps`` rows of channels; zeros if the sequence has none."""
    for j in range(taps):
        for c in range(width):
            put(window + j * _ROW + 4 * c, get(state + 4 * (c * taps + j)) if known else 0.0)


@kernel
def _close_window(window: int, state: int, taps: int, width: int, x: int, x_row: int, length: int) -> None:
    """Store the last ``taps`` inputs; of a shorter sequence the old window shifts in from the left."""
    for j in range(taps):
        source = length - taps + j
        row = x + source * x_row if source >= 0 else window + (taps + source) * _ROW
        for c in range(width):
            put(state + 4 * (c * taps + j), get(row + 4 * c))


@kernel
def _convolve(
    x: int, x_row: int, out: int, out_row: int, length: int, window: int, weight: int, weight_row: int,
    bias: int, taps: int, width: int, silu: int,
) -> None:  # fmt: skip
    """One sequence, one block of channels."""
    for i in range(length):
        for c in range(0, width, LANES):
            some = width - c
            acc = load_some(bias + 4 * c, some) if bias else splat(0.0)
            for w in range(taps + 1):
                source = i - taps + w
                row = x + source * x_row if source >= 0 else window + (taps + source) * _ROW
                acc = fma(load_some(weight + w * weight_row + 4 * c, some), load_some(row + 4 * c, some), acc)
            if silu:
                acc = silu_of(acc)
            store_some(out + i * out_row + 4 * c, acc, some)


def _job(args: int, control: int, rank: int) -> None:
    units, x, x_row, out = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    weight, bias, channels, taps = word(args, 4), word(args, 5), word(args, 6), word(args, 7)
    bounds, slots, known, sequences = word(args, 8), word(args, 9), word(args, 10), word(args, 11)
    state, state_row, silu = word(args, 12), word(args, 13), word(args, 14)
    window = word(args, 15) + rank * word(args, 16)
    while True:
        unit = claim(control)
        if unit >= units:
            break
        first = unit * _BLOCK
        width = min(_BLOCK, channels - first)
        for s in range(sequences):
            begin = slot_at(bounds, s)
            length = slot_at(bounds, s + 1) - begin
            if length <= 0:
                continue
            mine = state + slot_at(slots, s) * state_row + 4 * first * taps
            source = x + begin * x_row + 4 * first
            _open_window(window, mine, taps, width, slot_at(known, s))
            _convolve(
                source, x_row, out + 4 * (begin * channels + first), 4 * channels, length, window,
                weight + 4 * first, 4 * channels, bias + 4 * first if bias else 0, taps, width, silu,
            )  # fmt: skip
            _close_window(window, mine, taps, width, source, x_row, length)


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    silu: bool,
) -> Tensor:
    """See :class:`recurra.ops.conv1d.CausalConv1dVarlen`.

    Raises:
        ConfigError: inputs or windows in a dtype that isn't float32, bfloat16 or float16.
    """
    del chunks
    channels, width = weight.shape
    inputs = unit_rows(x, "x")
    by_tap = as_float32(weight, "weight").t().contiguous()
    wide_bias = None if bias is None else as_float32(bias, "bias").contiguous()
    states = states_by_slot(conv_state, slots, "mamba_cache_dtype")
    bounds = cu_seqlens.to(torch.int32).contiguous()
    known = has_state.to(torch.int32).contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    units = -(-channels // _BLOCK)
    threads = threads_for(units)
    scratch = torch.empty(threads, _MAX_WIDTH * _BLOCK)
    run(
        _job,
        table(
            units, inputs.data_ptr(), row_bytes(inputs), out.data_ptr(),
            by_tap.data_ptr(), address(wide_bias), channels, width - 1,
            bounds.data_ptr(), states.slots.data_ptr(), known.data_ptr(), slots.shape[0],
            states.rows.data_ptr(), row_bytes(states.rows), int(silu),
            scratch.data_ptr(), row_bytes(scratch),
        ),
        threads,
    )  # fmt: skip
    states.commit(bounds)
    return out.to(x.dtype)
