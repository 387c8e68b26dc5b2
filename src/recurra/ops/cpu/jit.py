"""Typed doors to Numba: compiled kernels, and instructions written in LLVM's language."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numba
from llvmlite import ir
from numba import types
from numba.core.ccallback import CFunc
from numba.extending import intrinsic

from recurra.ops.cpu.disk_cache import kernel_cache

F = TypeVar("F", bound=Callable[..., Any])

i1 = ir.IntType(1)
i16 = ir.IntType(16)
i32 = ir.IntType(32)
i64 = ir.IntType(64)
f32 = ir.FloatType()
f16 = ir.HalfType()

#: The signature of every job: address of its arguments, address of the pool's control block, rank.
JOB = types.void(types.int64, types.int64, types.int64)


def kernel(function: F) -> F:
    """Compile a top-level function at its first call; later processes load it from the disk cache."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)
    compiled._cache = kernel_cache(function)
    found: F = compiled
    return found


@cache
def address(function: Callable[..., None], signature: Any = JOB) -> int:
    """Compile a top-level function to a C function and return its address.

    Kernels reach each other through addresses where inlining would only repeat their code in every
    caller's compilation.
    """
    compiled: Any = CFunc(
        function, (signature.args, signature.return_type), locals={}, options={"nopython": True}
    )
    compiled._cache = kernel_cache(function)
    compiled.compile()
    _alive.append(compiled)
    return int(compiled.address)


#: Compiled C functions live as long as the process: their addresses are handed out.
_alive: list[Any] = []


def instruction(
    result: Any, arguments: tuple[Any, ...]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Turn ``emit(builder, *values)``, which writes LLVM instructions, into a function kernels can call."""

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        def typer(_context: Any, *_given: Any) -> tuple[Any, Any]:
            def lower(_ctx: Any, builder: Any, _signature: Any, values: Any) -> Any:
                out = emit(builder, *values)
                return ir.Constant(ir.IntType(8).as_pointer(), None) if result is types.void else out

            return result(*arguments), lower

        typer.__name__ = emit.__name__
        typer.__doc__ = emit.__doc__
        names = ["_context", *(f"_given{i}" for i in range(len(arguments)))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD  # Numba would pack variable arguments into a tuple
        typer.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in names]
        )
        made: Callable[..., Any] = intrinsic(typer)
        return made

    return decorate


def pointer(builder: Any, address: Any, kind: Any) -> Any:
    """An int64 address as an LLVM pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def declare(builder: Any, name: str, result: Any, arguments: list[Any]) -> Any:
    """An LLVM intrinsic of the current module."""
    module = builder.module
    if name in module.globals:
        return module.globals[name]
    return ir.Function(module, ir.FunctionType(result, arguments), name)
