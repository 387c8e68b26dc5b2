"""Subnormal numbers as zero while a kernel runs, on its thread alone.

Decayed states and products of small weights reach below 1.2e-38, where x86 cores take a hundred cycles an
instruction: a scan over strongly decaying heads ran fifteen times slower for it.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import types

from recurra.ops.cpu.jit import declare, i32, i64, instruction

_X86 = platform.machine() in ("x86_64", "AMD64")
_ARM = platform.machine() in ("aarch64", "arm64")
_FLUSH_X86 = 0x8040  # flush to zero, subnormals are zeros
_FLUSH_ARM = 1 << 24


def _read(builder: Any) -> Any:
    if _X86:
        place = builder.alloca(i32)
        read = declare(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [place.type])
        builder.call(read, [place])
        return builder.zext(builder.load(place), i64)
    if _ARM:
        return builder.call(declare(builder, "llvm.aarch64.get.fpcr", i64, []), [])
    return ir.Constant(i64, 0)


def _write(builder: Any, mode: Any) -> None:
    if _X86:
        place = builder.alloca(i32)
        builder.store(builder.trunc(mode, i32), place)
        write = declare(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [place.type])
        builder.call(write, [place])
    elif _ARM:
        builder.call(declare(builder, "llvm.aarch64.set.fpcr", ir.VoidType(), [i64]), [mode])


@instruction(types.int64, ())
def flush_subnormals(builder: Any) -> Any:
    """Begin; returns the thread's floating-point mode for :func:`restore_mode`."""
    mode = _read(builder)
    _write(builder, builder.or_(mode, ir.Constant(i64, _FLUSH_X86 if _X86 else _FLUSH_ARM)))
    return mode


@instruction(types.void, (types.int64,))
def restore_mode(builder: Any, mode: Any) -> None:
    """End: the thread's floating-point mode is what it was."""
    _write(builder, mode)
