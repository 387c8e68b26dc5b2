"""Atomic words, short spins and sleeping waits for kernels on several threads.

All orderings are sequentially consistent: the handshakes in ``threads`` (raise a flag, then look at the
other side's) need it, and there are only a few per chunk of work.
"""

from __future__ import annotations

import platform
import sys
from typing import Any

from llvmlite import ir
from numba import types

from recurra.ops.cpu.jit import declare, i32, i64, instruction, kernel, pointer

_int = types.int64
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
HAS_FUTEX = sys.platform == "linux" and _FUTEX > 0
_WAIT_PRIVATE, _WAKE_PRIVATE = 128, 129
_EVERYBODY = 2**31 - 1

_syscall = types.ExternalFunction("syscall", _int(_int, _int, _int, _int, _int, _int, _int))
_usleep = types.ExternalFunction("usleep", types.int32(types.uint32))


@instruction(_int, (_int, _int))
def fetch_add(builder: Any, address: Any, amount: Any) -> Any:
    """Add to the word at an address and return what it held before."""
    return builder.atomic_rmw("add", pointer(builder, address, i64), amount, "seq_cst")


@instruction(_int, (_int,))
def peek(builder: Any, address: Any) -> Any:
    """Read a word that other threads write."""
    return builder.load_atomic(pointer(builder, address, i64), "seq_cst", 8)


@instruction(types.void, (_int, _int))
def poke(builder: Any, address: Any, value: Any) -> None:
    """Write a word that other threads read."""
    builder.store_atomic(value, pointer(builder, address, i64), "seq_cst", 8)


@instruction(types.void, ())
def pause(builder: Any) -> None:
    """Tell the core that this is a spin."""
    machine = platform.machine()
    if machine in ("x86_64", "AMD64"):
        builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
    elif machine in ("aarch64", "arm64"):
        hint = declare(builder, "llvm.aarch64.hint", ir.VoidType(), [i32])
        builder.call(hint, [ir.Constant(i32, 1)])


@instruction(types.void, (_int, _int, _int, _int))
def call_job(builder: Any, function: Any, arguments: Any, control: Any, rank: Any) -> None:
    """Call a compiled job by its address."""
    kind = ir.FunctionType(ir.VoidType(), [i64, i64, i64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [arguments, control, rank])


if HAS_FUTEX:

    @kernel
    def sleep_while(address: int, value: int) -> None:
        """Sleep until woken, unless the word's low half has already moved on from ``value``."""
        _syscall(_FUTEX, address, _WAIT_PRIVATE, value & 0xFFFFFFFF, 0, 0, 0)

    @kernel
    def wake(address: int) -> None:
        """Wake every thread that sleeps on this word."""
        _syscall(_FUTEX, address, _WAKE_PRIVATE, _EVERYBODY, 0, 0, 0)

else:

    @kernel
    def sleep_while(address: int, value: int) -> None:
        """Sleep a moment; the caller looks again."""
        if peek(address) == value:
            _usleep(50)

    @kernel
    def wake(address: int) -> None:
        """Sleepers look by themselves."""
