"""One step of the gated short convolution on the CPU: a unit of work is some channels of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.ops.cpu.calls import address as pointer_of
from recurra.ops.cpu.calls import as_float32, row_bytes, run, states_by_slot, table, threads_for, unit_rows
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.vectors import get, put, slot_at, word

_CHANNELS = 512  # channels of a unit


@kernel
def _gate_and_convolve(
    window: int, weight: int, bias: int, x: int, b: int, c: int, y: int, count: int, taps: int
) -> None:
    """``taps`` is the width less one: the inputs that a window holds."""
    for i in range(count):
        u, w, new = window + 4 * i * taps, weight + 4 * i * (taps + 1), get(x + 4 * i) * get(b + 4 * i)
        total = new * get(w + 4 * taps)
        if bias:
            total += get(bias + 4 * i)
        for j in range(taps):
            held = get(u + 4 * j)
            total += held * get(w + 4 * j)
            if j:
                put(u + 4 * j - 4, held)
        put(u + 4 * taps - 4, new)
        put(y + 4 * i, total * get(c + 4 * i))


def _job(args: int, control: int, rank: int) -> None:
    units, blocks, channels, taps = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    weight, bias = word(args, 14), word(args, 15)
    while True:
        unit = claim(control)
        if unit >= units:
            break
        s, first = unit // blocks, unit % blocks * _CHANNELS
        count = min(_CHANNELS, channels - first)
        y = word(args, 16) + 4 * (s * channels + first)
        if slot_at(word(args, 4), s) == 0:
            for i in range(count):
                put(y + 4 * i, 0.0)
        else:
            _gate_and_convolve(
                word(args, 6) + slot_at(word(args, 5), s) * word(args, 7) + 4 * first * taps,
                weight + 4 * first * (taps + 1), bias + 4 * first if bias else 0,
                word(args, 8) + s * word(args, 9) + 4 * first, word(args, 10) + s * word(args, 11) + 4 * first,
                word(args, 12) + s * word(args, 13) + 4 * first, y, count, taps,
            )  # fmt: skip


def short_conv_update(
    x: Tensor, B: Tensor, C: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, slots: Tensor
) -> Tensor:
    """See :class:`recurra.ops.short_conv.ShortConvUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: inputs or windows in a dtype that isn't float32, bfloat16 or float16.
    """
    given = slots.to(torch.int32).contiguous()
    states = states_by_slot(conv_state, given, "mamba_cache_dtype")
    xs, Bs, Cs = unit_rows(x, "x"), unit_rows(B, "B"), unit_rows(C, "C")
    taps = as_float32(weight, "weight").contiguous()
    offset = None if bias is None else as_float32(bias, "bias").contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    rows, channels = x.shape
    blocks = -(-channels // _CHANNELS)
    arguments = table(
        rows * blocks, blocks, channels, weight.shape[1] - 1, given.data_ptr(), states.slots.data_ptr(),
        states.rows.data_ptr(), row_bytes(states.rows), xs.data_ptr(), row_bytes(xs), Bs.data_ptr(),
        row_bytes(Bs), Cs.data_ptr(), row_bytes(Cs), taps.data_ptr(), pointer_of(offset), out.data_ptr(),
    )  # fmt: skip
    run(_job, arguments, threads_for(rows * blocks))
    states.commit(torch.arange(rows + 1))
    return out.to(x.dtype)
