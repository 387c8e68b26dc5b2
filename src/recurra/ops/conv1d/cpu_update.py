"""One step of the causal convolution on the CPU, windows in place."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recurra.ops.cpu.calls import address as pointer_of
from recurra.ops.cpu.calls import as_float32, row_bytes, states_by_slot, table, unit_rows
from recurra.ops.cpu.jit import address, kernel
from recurra.ops.cpu.maths import silu
from recurra.ops.cpu.threads import claim, finish, thread_pool, wait_done
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import LANES, get, put, slot_at, word

_CHANNELS = 512  # channels of a unit


@kernel
def convolve(
    window: int, weight: int, bias: int, x: int, y: int, count: int, W: int, apply_silu: int
) -> None:
    """``count`` channels of one sequence; y may be x. bias 0 means none."""
    if W == 4:  # the usual width, its window in registers
        for c in range(count):
            u, w, new = window + 12 * c, weight + 16 * c, get(x + 4 * c)
            u1, u2 = get(u + 4), get(u + 8)
            sums = get(bias + 4 * c) if bias else np.float32(0.0)
            sums = get(u) * get(w) + u1 * get(w + 4) + u2 * get(w + 8) + new * get(w + 12) + sums
            put(u, u1)
            put(u + 4, u2)
            put(u + 8, new)
            put(y + 4 * c, sums)
    else:
        for c in range(count):
            u, w, new = window + 4 * c * (W - 1), weight + 4 * c * W, get(x + 4 * c)
            sums = new * get(w + 4 * (W - 1))
            if bias:
                sums += get(bias + 4 * c)
            for i in range(W - 1):
                sums += get(u + 4 * i) * get(w + 4 * i)
            for i in range(W - 2):
                put(u + 4 * i, get(u + 4 * i + 4))
            put(u + 4 * (W - 2), new)
            put(y + 4 * c, sums)
    if apply_silu:
        for c in range(0, count, LANES):
            store_some(y + 4 * c, silu(load_some(y + 4 * c, count - c)), count - c)


def _job(args: int, control: int, rank: int) -> None:
    S, channels, W, apply_silu = word(args, 0), word(args, 1), word(args, 2), word(args, 3)
    blocks = (channels + _CHANNELS - 1) // _CHANNELS
    ticket = claim(control)
    while ticket < S * blocks:
        s, c = ticket // blocks, ticket % blocks * _CHANNELS
        count = min(_CHANNELS, channels - c)
        y = word(args, 12) + 4 * (s * channels + c)
        if slot_at(word(args, 6), s) == 0:
            for i in range(count):
                put(y + 4 * i, 0.0)
        else:
            window = word(args, 4) + slot_at(word(args, 7), s) * word(args, 5) + 4 * c * (W - 1)
            bias = word(args, 11)
            x = word(args, 8) + s * word(args, 9) + 4 * c
            convolve(
                window, word(args, 10) + 4 * c * W, bias + 4 * c if bias else 0, x, y, count, W, apply_silu
            )
        ticket = finish(control)
    if rank == 0:
        wait_done(control, S * blocks)


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    *,
    silu: bool,
) -> Tensor:
    """See :class:`recurra.ops.conv1d.CausalConv1dUpdate`. Padding rows give zeros.

    Raises:
        ConfigError: a dtype that isn't float32, bfloat16 or float16.
    """
    given = slots.to(torch.int32).contiguous()
    states = states_by_slot(conv_state, given, "mamba_cache_dtype")
    rows = unit_rows(x, "x")
    taps = as_float32(weight, "weight").contiguous()
    offset = None if bias is None else as_float32(bias, "bias").contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    S, channels = x.shape
    arguments = table(
        S, channels, weight.shape[1], int(silu), states.rows.data_ptr(), row_bytes(states.rows), given.data_ptr(),
        states.slots.data_ptr(), rows.data_ptr(), row_bytes(rows), taps.data_ptr(), pointer_of(offset),
        out.data_ptr(),
    )  # fmt: skip
    thread_pool(torch.get_num_threads()).run(address(_job), arguments.numpy())
    states.commit(torch.arange(S + 1))
    return out.to(x.dtype)
