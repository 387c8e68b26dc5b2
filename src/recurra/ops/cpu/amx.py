"""Tile registers of Intel's AMX units, and how float32 goes through them without losing a bit.

A tile product takes bfloat16 on both sides and adds up in float32. A float32 has 24 significant bits and a
bfloat16 8, so each activation is the exact sum of three bfloat16 (*planes*): its leading 8 bits, the next 8,
and the rest, cut off and not rounded, so that no part can overflow. With bfloat16 weights, which are one
plane already, three tile products give what a float32 product gives.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils

from recurra.ops.cpu.jit import declare, i32, i64, instruction, pointer
from recurra.ops.cpu.vectors import LANES, ivec, vec

TILE_ROWS = 16
TILE_BYTES = 1024  # 16 rows of 64 bytes
PLANES = 3
STEP = 32  # values along k of one tile product

_i8 = ir.IntType(8)
_int = types.int64
#: Linux: ask that the process may use a feature of the extended state, here the tiles' data.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILEDATA = 158, 0x1023, 18


@cache
def amx_ready() -> bool:
    """Whether this processor has bfloat16 tiles and this process may use them (asked for once)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-bf16") and features.get("avx512f")):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILEDATA) == 0)


def _configure(columns: int) -> Callable[..., Any]:
    """An instruction that shapes the tiles: 0 to 3 and 6, 7 have ``columns`` words a row, 4 and 5 sixteen."""

    @instruction(types.void, ())
    def configure(builder: Any) -> None:
        words = [0] * 64
        words[0] = 1  # the palette
        for tile in range(8):
            words[16 + 2 * tile] = 4 * (LANES if tile in (4, 5) else columns)
            words[48 + tile] = TILE_ROWS
        kind = ir.ArrayType(_i8, 64)
        place = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, words), place)
        load = declare(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [_i8.as_pointer()])
        builder.call(load, [builder.bitcast(place, _i8.as_pointer())])

    return configure


#: For batches of many rows, and of one.
begin_many, begin_one = _configure(LANES), _configure(1)


@instruction(types.void, ())
def end_tiles(builder: Any) -> None:
    """Give the tile registers back: a core with live tiles can't sleep deeply."""
    builder.call(declare(builder, "llvm.x86.tilerelease", ir.VoidType(), []), [])


def tile_zero(tile: int) -> Callable[..., Any]:
    """An instruction that clears a tile."""

    @instruction(types.void, ())
    def zero(builder: Any) -> None:
        clear = declare(builder, "llvm.x86.tilezero", ir.VoidType(), [_i8])
        builder.call(clear, [ir.Constant(_i8, tile)])

    return zero


def tile_load(tile: int) -> Callable[..., Any]:
    """An instruction ``(address, bytes from row to row)``."""

    @instruction(types.void, (_int, _int))
    def load(builder: Any, address: Any, stride: Any) -> None:
        read = declare(builder, "llvm.x86.tileloadd64", ir.VoidType(), [_i8, _i8.as_pointer(), i64])
        builder.call(read, [ir.Constant(_i8, tile), pointer(builder, address, _i8), stride])

    return load


def tile_store(tile: int) -> Callable[..., Any]:
    """An instruction ``(address, bytes from row to row)``."""

    @instruction(types.void, (_int, _int))
    def store(builder: Any, address: Any, stride: Any) -> None:
        write = declare(builder, "llvm.x86.tilestored64", ir.VoidType(), [_i8, _i8.as_pointer(), i64])
        builder.call(write, [ir.Constant(_i8, tile), pointer(builder, address, _i8), stride])

    return store


def tile_product(total: int, left: int, right: int) -> Callable[..., Any]:
    """An instruction: ``total[i, j] += sum over 32 k of left[i, k] * right[k, j]``."""

    @instruction(types.void, ())
    def product(builder: Any) -> None:
        multiply = declare(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), [_i8] * 3)
        builder.call(multiply, [ir.Constant(_i8, n) for n in (total, left, right)])

    return product


@instruction(types.void, (_int, _int, _int))
def split_planes(builder: Any, source: Any, target: Any, plane_bytes: Any) -> None:
    """32 float32 to three planes of 16 words, each word two bfloat16 that are neighbours along k."""
    high = ir.Constant(ivec, [-65536] * LANES)
    shift = ir.Constant(ivec, [16] * LANES)
    halves = [
        builder.load(pointer(builder, builder.add(source, ir.Constant(i64, n)), vec), align=4)
        for n in (0, 4 * LANES)
    ]
    picks = [ir.Constant(ivec, list(range(first, 2 * LANES, 2))) for first in (0, 1)]
    rest = [builder.shuffle_vector(*halves, pick) for pick in picks]
    for plane in range(PLANES):
        bits = [builder.and_(builder.bitcast(part, ivec), high) for part in rest]
        word = builder.or_(builder.lshr(bits[0], shift), bits[1])
        at = builder.add(target, builder.mul(plane_bytes, ir.Constant(i64, plane)))
        builder.store(word, pointer(builder, at, ir.VectorType(i32, LANES)), align=4)
        rest = [builder.fsub(part, builder.bitcast(lead, vec)) for part, lead in zip(rest, bits, strict=True)]
