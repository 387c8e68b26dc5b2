"""The product of float32 rows with bfloat16 weights on AMX tiles; see :mod:`recurra.ops.cpu.amx`.

Weight tiles are read where they lie, 16 rows by 32 columns. The rows of x are packed once, in the layout that
the right operand of a tile product has, and multiplied with every weight tile: ``packed[b][t][p]`` is the tile
of batch rows 16 b on, columns 32 t on, plane p. An output adds its leading plane's products in one float32
sum and those of the other two in another; so it depends on its row of x and its weight row alone.
"""

from __future__ import annotations

from recurra.ops.cpu.amx import (
    PLANES,
    STEP,
    TILE_BYTES,
    TILE_ROWS,
    begin_many,
    begin_one,
    end_tiles,
    split_planes,
    tile_load,
    tile_product,
    tile_store,
    tile_zero,
)
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.matmul import few_rows_bf16
from recurra.ops.cpu.tiles import transpose_square
from recurra.ops.cpu.vectors import add, load, prefetch_second, splat, store

_zero0, _zero1, _zero2, _zero3 = (tile_zero(n) for n in range(4))
_store0, _store1, _store2, _store3 = (tile_store(n) for n in range(4))
_left4, _left5, _right6 = (tile_load(n) for n in (4, 5, 6))
_lead0, _lead1 = tile_product(0, 4, 6), tile_product(1, 5, 6)
_rest2, _rest3 = tile_product(2, 4, 6), tile_product(3, 5, 6)

_SPARE = 4 * TILE_BYTES  # before the packed rows: tiles on their way to y


def scratch_bytes(batch: int, columns: int) -> int:
    """Bytes of a thread's scratch for ``batch`` rows of ``columns`` values."""
    return _SPARE + -(-batch // TILE_ROWS) * TILE_ROWS * columns * 2 * PLANES


@kernel
def _pack_one(x: int, k: int, packed: int) -> None:
    """One row: a plane of a tile is 16 words in a row."""
    for t in range(k // STEP):
        split_planes(x + 4 * STEP * t, packed + 64 * PLANES * t, 64)


@kernel
def _pack(x: int, xs: int, count: int, k: int, spare: int, packed: int) -> None:
    """Up to 16 rows; those that are missing count as zeros."""
    for j in range(count, TILE_ROWS):
        for p in range(PLANES):
            store(spare + p * TILE_BYTES + 64 * j, splat(0.0))
    for t in range(k // STEP):
        for j in range(count):
            split_planes(x + j * xs + 4 * STEP * t, spare + 64 * j, TILE_BYTES)
        for p in range(PLANES):
            transpose_square(spare + p * TILE_BYTES, 64, packed + (PLANES * t + p) * TILE_BYTES, 64)


@kernel
def pack_rows(x: int, xs: int, s: int, k: int, scratch: int) -> None:
    """Pack all rows of x into a scratch of :func:`scratch_bytes`."""
    if s == 1:
        _pack_one(x, k, scratch + _SPARE)
    else:
        for j in range(0, s, TILE_ROWS):
            _pack(x + j * xs, xs, min(TILE_ROWS, s - j), k, scratch, scratch + _SPARE + j * k * 2 * PLANES)


@kernel
def _give(spare: int, y: int, ys: int, count: int) -> None:
    """Add the two sums of 16 weight rows by 16 batch rows, and write them to ``count`` rows of y."""
    for i in range(TILE_ROWS):
        at = spare + 64 * i
        store(at, add(load(at), load(at + TILE_BYTES)))
    if count == TILE_ROWS:
        transpose_square(spare, 64, y, ys)
    else:
        transpose_square(spare, 64, spare + TILE_BYTES, 64)
        for j in range(count):
            store(y + j * ys, load(spare + TILE_BYTES + 64 * j))


@kernel
def _two_tiles(w: int, ws: int, packed: int, plane: int, k: int, following: int) -> None:
    """32 weight rows; tiles 0 and 1 get the leading sums, 2 and 3 the others'."""
    _zero0()
    _zero1()
    _zero2()
    _zero3()
    below, right = w + TILE_ROWS * ws, plane // TILE_ROWS
    for t in range(k // STEP):
        _left4(w + 64 * t, ws)
        _left5(below + 64 * t, ws)
        at = packed + PLANES * plane * t
        _right6(at, right)
        _lead0()
        _lead1()
        _right6(at + plane, right)
        _rest2()
        _rest3()
        _right6(at + 2 * plane, right)
        _rest2()
        _rest3()
        if following:
            for line in range(32):
                prefetch_second(following + 2048 * t + 64 * line)


@kernel
def _one_tile(w: int, ws: int, packed: int, plane: int, k: int) -> None:
    """16 weight rows."""
    _zero0()
    _zero2()
    for t in range(k // STEP):
        _left4(w + 64 * t, ws)
        at = packed + PLANES * plane * t
        _right6(at, plane // TILE_ROWS)
        _lead0()
        _right6(at + plane, plane // TILE_ROWS)
        _rest2()
        _right6(at + 2 * plane, plane // TILE_ROWS)
        _rest2()


@kernel
def _many(w: int, ws: int, m: int, s: int, k: int, y: int, ys: int, spare: int) -> None:
    begin_many()
    for i in range(0, m - m % TILE_ROWS, 2 * TILE_ROWS):
        for j in range(0, s, TILE_ROWS):
            packed, count = spare + _SPARE + j * k * 2 * PLANES, min(TILE_ROWS, s - j)
            out = y + j * ys + 4 * i
            if i + 2 * TILE_ROWS <= m:
                _two_tiles(w + i * ws, ws, packed, TILE_BYTES, k, 0)
                _store1(spare + 2 * TILE_BYTES, 64)
                _store3(spare + 3 * TILE_BYTES, 64)
                _give(spare + 2 * TILE_BYTES, out + 4 * TILE_ROWS, ys, count)
            else:
                _one_tile(w + i * ws, ws, packed, TILE_BYTES, k)
            _store0(spare, 64)
            _store2(spare + TILE_BYTES, 64)
            _give(spare, out, ys, count)
    end_tiles()


@kernel
def _give_one(spare: int, y: int) -> None:
    store(y, add(load(spare), load(spare + 64)))


@kernel
def _one(w: int, ws: int, m: int, k: int, y: int, spare: int, following: int) -> None:
    begin_one()
    packed = spare + _SPARE
    for i in range(0, m - m % TILE_ROWS, 2 * TILE_ROWS):
        if i + 2 * TILE_ROWS <= m:
            then = w + (i + 2 * TILE_ROWS) * ws if i + 4 * TILE_ROWS <= m else following
            _two_tiles(w + i * ws, ws, packed, 64, k, then)
            _store1(spare + 128, 4)
            _store3(spare + 192, 4)
            _give_one(spare + 128, y + 4 * (i + TILE_ROWS))
        else:
            _one_tile(w + i * ws, ws, packed, 64, k)
        _store0(spare, 4)
        _store2(spare + 64, 4)
        _give_one(spare, y + 4 * i)
    end_tiles()


def product_bf16_amx(
    w: int, ws: int, m: int, x: int, xs: int, s: int, k: int, y: int, ys: int, scratch: int, following: int,
    ready: int,
) -> None:  # fmt: skip
    """Bfloat16 weights, k a multiple of 32; see :data:`recurra.ops.cpu.matmul.PRODUCT` for the arguments."""
    if ready == 0:
        pack_rows(x, xs, s, k, scratch)
    if s == 1:
        _one(w, ws, m, k, y, scratch, following)
    else:
        _many(w, ws, m, s, k, y, ys, scratch)
    done = m - m % TILE_ROWS
    few_rows_bf16(w + done * ws, ws, m - done, x, xs, s, k, y + 4 * done, ys)
