"""The matrix product on the CPU, weights in float32, bfloat16 or float16, sums in float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.cpu.amx import STEP, TILE_ROWS, amx_ready
from recurra.ops.cpu.calls import address as pointer_of
from recurra.ops.cpu.calls import as_float32, row_bytes, table, unit_rows
from recurra.ops.cpu.jit import address, kernel
from recurra.ops.cpu.matmul import PRODUCT, PRODUCTS, call_product
from recurra.ops.cpu.threads import claim, finish, thread_pool, wait_done
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import BF16, F16, F32, I8, LANES, add, word
from recurra.ops.linear.cpu_amx import product_bf16_amx, scratch_bytes
from recurra.ops.linear.cpu_many import MANY_ROWS, many_rows

KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_SCALED = {torch.int8: I8}  # multiplied by their scales afterwards
_PANEL_BYTES = 1 << 19  # batch rows taken at once: a part of a core's second-level cache


def matrix_words(weight: Tensor, bias: Tensor | None, kinds: dict[torch.dtype, int] = KINDS) -> list[int]:
    """A matrix as kernels see it: data, product, bytes of a row, rows, columns, bias.

    Args:
        kinds: the dtypes that it may have.

    Raises:
        ConfigError: a dtype that no kernel widens.
    """
    if weight.dtype not in kinds:
        raise ConfigError(
            "dtype", str(weight.dtype), "the cpu backend has no product for such weights.",
            'Use "float32", "bfloat16" or "float16".',
        )  # fmt: skip
    assert weight.stride(1) == 1, weight.stride()
    product = product_bf16_amx if fits_tiles(weight) else PRODUCTS[kinds[weight.dtype]]
    return [
        weight.data_ptr(), address(product, PRODUCT), row_bytes(weight), *weight.shape, pointer_of(bias)
    ]  # fmt: skip


def fits_tiles(weight: Tensor) -> bool:
    """Whether the processor's tiles multiply this weight; it never depends on the batch."""
    rows, columns = weight.shape
    return weight.dtype == torch.bfloat16 and columns % STEP == 0 and rows >= TILE_ROWS and amx_ready()


def scratch_row(batch: int, columns: int) -> int:
    """Bytes of a thread's scratch, whatever the product."""
    return max(32 * columns, scratch_bytes(batch, columns))


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
    ready: int,
) -> None:
    """``y[s, i] = x[s] . w[first + i] + bias[first + i]``; matrix: the words of :func:`matrix_words`.

    ``following`` is what the thread will probably read next; nothing depends on it but time. ``ready`` says
    that ``scratch`` is as the thread's last product left it, and that one had the same rows of x.
    """
    w_bytes, bias = word(matrix, 2), word(matrix, 5)
    w = word(matrix, 0) + first * w_bytes
    call_product(
        word(matrix, 1), w, w_bytes, rows, x, x_bytes, batch, word(matrix, 4), y, y_bytes, scratch, following,
        ready,
    )  # fmt: skip
    if bias:
        add_bias(y, y_bytes, batch, bias + 4 * first, rows)


def _job(args: int, control: int, rank: int) -> None:
    """Matrix words, then: rows of a chunk, batch rows of a panel, x, its bytes, batch, y, scratch, its bytes,
    threads."""
    out_rows, step, panel, batch = word(args, 3), word(args, 6), word(args, 7), word(args, 10)
    x_bytes, scratch = word(args, 9), word(args, 12) + rank * word(args, 13)
    blocks, panels = (out_rows + step - 1) // step, (batch + panel - 1) // panel
    ticket, packed = claim(control), -1
    while ticket < blocks * panels:
        row, s = ticket % blocks * step, ticket // blocks * panel
        y = word(args, 11) + 4 * (s * out_rows + row)
        multiply(
            args, row, min(step, out_rows - row), word(args, 8) + s * x_bytes, x_bytes, min(panel, batch - s),
            y, 4 * out_rows, scratch, word(args, 0) + (row + word(args, 14) * step) * word(args, 2),
            int(packed == s),
        )  # fmt: skip
        packed = s
        ticket = finish(control)
    if rank == 0:
        wait_done(control, blocks * panels)


def chunk_rows(columns: int, batch: int, tiled: bool, num_threads: int) -> int:
    """Weight rows of a chunk, a multiple of 16.

    About 50 KB of weights, or fewer where a large batch makes them long work. Tiles like 200 KB, as long as a
    few threads share the matrix (docs/lab-notes/cpu-decode.md).
    """
    most = 128 if tiled and num_threads <= 4 else 64
    rows = max(16, min(most, (4 if tiled else 1) * 32 * 768 // max(columns, 1))) // 16 * 16
    return rows if batch <= 32 or tiled else 32


def panel_rows(columns: int) -> int:
    """Batch rows taken at once, a multiple of 16."""
    return max(16, min(128, _PANEL_BYTES // max(4 * columns, 1)) // 16 * 16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.Linear`. A row's result doesn't depend on the other rows.

    Many rows go to :mod:`recurra.ops.linear.cpu_many`.

    Raises:
        ConfigError: a dtype that isn't float32, bfloat16 or float16.
    """
    return _product(x, weight, bias, KINDS)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, kinds: dict[torch.dtype, int]) -> Tensor:
    wide = unit_rows(x, "x")
    weight = weight.detach()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    offset = None if bias is None else as_float32(bias, "bias").contiguous()
    batch, columns = wide.shape
    tiled = fits_tiles(weight)
    if batch >= MANY_ROWS and not tiled and weight.dtype in kinds:
        return many_rows(wide, weight, offset).to(x.dtype)
    out = torch.empty(batch, weight.shape[0], dtype=torch.float32)
    pool = thread_pool(torch.get_num_threads())
    panel = panel_rows(columns)
    scratch = np.empty((pool.num_threads, scratch_row(min(panel, batch), columns)), dtype=np.uint8)
    arguments = table(
        *matrix_words(weight, offset, kinds), chunk_rows(columns, batch, tiled, pool.num_threads), panel,
        wide.data_ptr(), row_bytes(wide), batch, out.data_ptr(), scratch.ctypes.data, scratch.strides[0],
        pool.num_threads,
    )  # fmt: skip
    pool.run(address(_job), arguments.numpy())
    return out.to(x.dtype)


def linear_scaled(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """See :class:`recurra.ops.linear.LinearScaled`, for int8 weights. A row's result doesn't depend on the others.

    Raises:
        ConfigError: x in a dtype that isn't float32, bfloat16 or float16.
    """
    assert weight.dtype == torch.int8, weight.dtype
    product = _product(unit_rows(x, "x"), weight, None, _SCALED).mul_(as_float32(scale, "scale").view(-1))
    return (product if bias is None else product.add_(as_float32(bias, "bias"))).to(x.dtype)
