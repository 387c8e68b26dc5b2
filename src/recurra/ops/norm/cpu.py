"""The root-mean-square norms on the CPU: a unit of work is a few rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from recurra.ops.cpu.calls import address, as_float32, row_bytes, run, table, threads_for, unit_rows
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.maths import silu
from recurra.ops.cpu.threads import claim
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import LANES, add, fma, mul, real, splat, total, word

_ROWS = 16  # rows of a unit


@kernel
def _squares(x: int, z: int, out: int, width: int) -> Any:
    """The sum of squares of a group of columns; with a gate, of x * silu(z), which is left in ``out``."""
    squares, more = splat(0.0), splat(0.0)
    for c in range(0, width, 2 * LANES):
        a = load_some(x + 4 * c, width - c)
        b = load_some(x + 4 * (c + LANES), width - c - LANES)
        if z:
            a = mul(a, silu(load_some(z + 4 * c, width - c)))
            b = mul(b, silu(load_some(z + 4 * (c + LANES), width - c - LANES)))
            store_some(out + 4 * c, a, width - c)
            store_some(out + 4 * (c + LANES), b, width - c - LANES)
        squares, more = fma(a, a, squares), fma(b, b, more)
    return total(add(squares, more))


@kernel
def norm_group(x: int, z: int, weight: int, out: int, width: int, eps: float, before: int) -> None:
    """One group of columns of one row. ``before``: the norm comes before the gate."""
    gated = z if not before else 0
    mean = np.float32(_squares(x, gated, out, width) / np.float32(width))
    scale = splat(np.float32(np.float32(1.0) / np.sqrt(np.float32(mean + eps))))
    source = out if gated else x
    for c in range(0, width, LANES):
        some = width - c
        y = mul(load_some(source + 4 * c, some), scale)
        if weight:
            y = mul(y, load_some(weight + 4 * c, some))
        if z and before:
            y = mul(y, silu(load_some(z + 4 * c, some)))
        store_some(out + 4 * c, y, some)


def _job(args: int, control: int, rank: int) -> None:
    units, x, x_row, z, z_row = word(args, 0), word(args, 1), word(args, 2), word(args, 3), word(args, 4)
    weight, out, rows, width = word(args, 5), word(args, 6), word(args, 7), word(args, 8)
    group, before, eps = word(args, 9), word(args, 10), real(args, 11)
    while True:
        unit = claim(control)
        if unit >= units:
            break
        for r in range(unit * _ROWS, min(rows, (unit + 1) * _ROWS)):
            for c in range(0, width, group):
                norm_group(
                    x + r * x_row + 4 * c, z + r * z_row + 4 * c if z else 0, weight + 4 * c if weight else 0,
                    out + 4 * (r * width + c), group, eps, before,
                )  # fmt: skip


def _norm(
    x: Tensor, z: Tensor | None, weight: Tensor | None, eps: float, group: int, norm_before_gate: bool
) -> Tensor:
    inputs = unit_rows(x, "x")
    gate = None if z is None else unit_rows(z, "z")
    wide_weight = None if weight is None else as_float32(weight, "weight").contiguous()
    out = torch.empty(x.shape, dtype=torch.float32)
    rows, width = x.shape
    units = -(-rows // _ROWS)
    run(
        _job,
        table(
            units, inputs.data_ptr(), row_bytes(inputs), address(gate), 0 if gate is None else row_bytes(gate),
            address(wide_weight), out.data_ptr(), rows, width, group, int(norm_before_gate), float(eps),
        ),
        threads_for(units),
    )  # fmt: skip
    return out.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See :class:`recurra.ops.norm.RMSNorm`.

    Raises:
        ConfigError: a dtype that isn't float32, bfloat16 or float16.
    """
    return _norm(x, None, weight, eps, x.shape[1], norm_before_gate=False)


def rms_norm_gated(
    x: Tensor,
    z: Tensor | None,
    weight: Tensor,
    eps: float,
    group_size: int,
    *,
    norm_before_gate: bool = False,
) -> Tensor:
    """See :class:`recurra.ops.norm.RMSNormGated`.

    Raises:
        ConfigError: a dtype that isn't float32, bfloat16 or float16.
    """
    return _norm(x, z, weight, eps, group_size, norm_before_gate=norm_before_gate)
