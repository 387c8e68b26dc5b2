"""The matrix product on the CPU, weights in float32, bfloat16 or float16, sums in float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.cpu.calls import address as pointer_of
from recurra.ops.cpu.calls import as_float32, row_bytes, table, unit_rows
from recurra.ops.cpu.jit import address, kernel
from recurra.ops.cpu.matmul import call_product, product_address
from recurra.ops.cpu.threads import claim, finish, thread_pool, wait_done
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import BF16, F16, F32, LANES, add, word
from recurra.ops.linear.cpu_many import MANY_ROWS, many_rows

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_PANEL_BYTES = 1 << 19  # batch rows taken at once: a part of a core's second-level cache


def matrix_words(weight: Tensor, bias: Tensor | None) -> list[int]:
    """A matrix as kernels see it: data, product, bytes of a row, rows, columns, bias.

    Raises:
        ConfigError: a dtype that no kernel widens.
    """
    if weight.dtype not in KINDS:
        raise ConfigError(
            "dtype", str(weight.dtype), "the cpu backend has no product for such weights.",
            'Use "float32", "bfloat16" or "float16".',
        )  # fmt: skip
    assert weight.stride(1) == 1, weight.stride()
    product = product_address(KINDS[weight.dtype])
    return [weight.data_ptr(), product, row_bytes(weight), *weight.shape, pointer_of(bias)]


@kernel
def add_bias(y: int, y_bytes: int, batch: int, bias: int, count: int) -> None:
    """``y[s] += bias`` for ``count`` columns of ``batch`` rows."""
    for s in range(batch):
        for c in range(0, count, LANES):
            at = y + s * y_bytes + 4 * c
            store_some(at, add(load_some(at, count - c), load_some(bias + 4 * c, count - c)), count - c)


@kernel
def multiply(
    matrix: int,
    first: int,
    rows: int,
    x: int,
    x_bytes: int,
    batch: int,
    y: int,
    y_bytes: int,
    scratch: int,
    following: int,
) -> None:
    """``y[s, i] = x[s] . w[first + i] + bias[first + i]``; matrix: the words of :func:`matrix_words`.

    ``following`` is what the thread will probably read next; nothing depends on it but time.
    """
    w_bytes, bias = word(matrix, 2), word(matrix, 5)
    w = word(matrix, 0) + first * w_bytes
    call_product(
        word(matrix, 1), w, w_bytes, rows, x, x_bytes, batch, word(matrix, 4), y, y_bytes, scratch, following
    )
    if bias:
        add_bias(y, y_bytes, batch, bias + 4 * first, rows)


def _job(args: int, control: int, rank: int) -> None:
    """Matrix words, then: rows of a chunk, batch rows of a panel, x, its bytes, batch, y, scratch, its bytes,
    threads."""
    out_rows, step, panel, batch = word(args, 3), word(args, 6), word(args, 7), word(args, 10)
    x_bytes, scratch = word(args, 9), word(args, 12) + rank * word(args, 13)
    blocks, panels = (out_rows + step - 1) // step, (batch + panel - 1) // panel
    ticket = claim(control)
    while ticket < blocks * panels:
        row, s = ticket % blocks * step, ticket // blocks * panel
        y = word(args, 11) + 4 * (s * out_rows + row)
        multiply(
            args, row, min(step, out_rows - row), word(args, 8) + s * x_bytes, x_bytes, min(panel, batch - s),
            y, 4 * out_rows, scratch, word(args, 0) + (row + word(args, 14) * step) * word(args, 2),
        )  # fmt: skip
        ticket = finish(control)
    if rank == 0:
        wait_done(control, blocks * panels)


def chunk_rows(columns: int, batch: int) -> int:
    """Weight rows of a chunk: about 100 KB of weights, or fewer where a large batch makes them long work."""
    rows = max(8, min(64, 32 * 768 // max(columns, 1)))
    return rows // 8 * 8 if batch <= 32 else 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.Linear`. A row's result doesn't depend on the other rows.

    Many rows go to :mod:`recurra.ops.linear.cpu_many`.

    Raises:
        ConfigError: a dtype that isn't float32, bfloat16 or float16.
    """
    wide = unit_rows(x, "x")
    weight = weight.detach()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    offset = None if bias is None else as_float32(bias, "bias").contiguous()
    batch, columns = wide.shape
    if batch >= MANY_ROWS:
        return many_rows(wide, weight, offset).to(x.dtype)
    out = torch.empty(batch, weight.shape[0], dtype=torch.float32)
    pool = thread_pool(torch.get_num_threads())
    scratch = np.empty((pool.num_threads, 8 * columns), dtype=np.float32)
    arguments = table(
        *matrix_words(weight, offset), chunk_rows(columns, batch), max(12, _PANEL_BYTES // max(4 * columns, 1)),
        wide.data_ptr(), row_bytes(wide), batch, out.data_ptr(), scratch.ctypes.data, scratch.strides[0],
        pool.num_threads,
    )  # fmt: skip
    pool.run(address(_job), arguments.numpy())
    return out.to(x.dtype)
