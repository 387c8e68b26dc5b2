"""The product of some rows with a weight: ``y[s, m] = sum_k x[s, k] * w[m, k]``.

Every output has its own sixteen partial sums over k, added up at the end in one fixed order. So a row's
result depends on nothing but that row and the weight: not on the batch, the tile or the thread. Tiles of
8 weight rows by up to 3 batch rows keep 24 sums in registers; with a larger batch a narrow weight is
widened once per tile, into a buffer that stays in the core's cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from recurra.ops.cpu.jit import f32, i32, i64, instruction, kernel, pointer
from recurra.ops.cpu.vectors import (
    BF16,
    F16,
    F32,
    I8,
    LANES,
    first_lanes,
    fma_of,
    fold,
    load_bf16,
    load_bf16_first,
    load_f16,
    load_f16_first,
    load_i8,
    load_i8_first,
    load_stored,
    load_stored_first,
    prefetch_at,
    splat_of,
    store,
    store_first,
    total_of,
    vec,
)

ROWS = 8  # weight rows of a tile
COLUMNS = 3  # batch rows of a tile
_WIDTH = {F32: 4, BF16: 2, F16: 2, I8: 1}

_int = types.int64
#: w, bytes of a weight row, weight rows, x, bytes of an x row, batch rows, k, y, bytes of a y row, scratch,
#: address that the thread will probably read next, whether scratch is as the thread's last product of the
#: same rows of x left it
PRODUCT = types.void(*[_int] * 12)


def _load_all(builder: Any, rows: list[Any], kind: int, lanes_mask: Any) -> list[Any]:
    if lanes_mask is None:
        return [load_stored(builder, row, kind) for row in rows]
    return [load_stored_first(builder, row, kind, lanes_mask) for row in rows]


def _accumulate(
    builder: Any, w: list[Any], x: list[Any], kind: int, sums: list[Any], lanes_mask: Any = None
) -> list[Any]:
    """One step of 16 along k for every pair of a weight row and a batch row."""
    columns = _load_all(builder, x, F32, lanes_mask)
    out = []
    for i, row in enumerate(w):
        (weights,) = _load_all(builder, [row], kind, lanes_mask)
        out += [fma_of(builder, weights, column, sums[i * len(x) + j]) for j, column in enumerate(columns)]
    return out


def _offset(builder: Any, addresses: list[Any], step: Any) -> list[Any]:
    return [builder.add(a, step) for a in addresses]


def _prefetch(builder: Any, start: Any, at: Any, lines: int) -> None:
    """Ask for some lines of what comes next: the memory's latency is longer than the core can look ahead.

    One line a step is for many batch rows, whose tile must not be driven out of the first-level cache.
    """
    place = builder.add(start, builder.mul(at, ir.Constant(i64, 4 * lines)))
    for i in range(lines):
        prefetch_at(builder, builder.add(place, ir.Constant(i64, 64 * i)), 3 if lines > 1 else 2)


def _loop(
    builder: Any, w: list[Any], x: list[Any], kind: int, k: Any, following: Any, lines: int
) -> list[Any]:
    """All of k: whole vectors in a loop, then the rest under a mask."""
    zero = splat_of(builder, ir.Constant(f32, 0.0))
    start = builder.block
    head, body, after, rest, end = (
        builder.append_basic_block(name) for name in ("head", "body", "after", "rest", "end")
    )
    whole = builder.and_(k, ir.Constant(i64, -LANES))
    builder.branch(head)

    builder.position_at_end(head)
    at = builder.phi(i64)
    sums = [builder.phi(vec) for _ in range(len(w) * len(x))]
    at.add_incoming(ir.Constant(i64, 0), start)
    for s in sums:
        s.add_incoming(zero, start)
    builder.cbranch(builder.icmp_signed("<", at, whole), body, after)

    builder.position_at_end(body)
    x_step, w_step = (builder.mul(at, ir.Constant(i64, n)) for n in (4, _WIDTH[kind]))
    w_at = _offset(builder, w, w_step)
    _prefetch(builder, following, at, lines)
    updated = _accumulate(builder, w_at, _offset(builder, x, x_step), kind, sums)
    at.add_incoming(builder.add(at, ir.Constant(i64, LANES)), body)
    for s, new in zip(sums, updated, strict=True):
        s.add_incoming(new, body)
    builder.branch(head)

    builder.position_at_end(after)
    builder.cbranch(builder.icmp_signed("<", whole, k), rest, end)

    builder.position_at_end(rest)
    lanes_mask = first_lanes(builder, builder.sub(k, whole))
    x_rest, w_rest = (builder.mul(whole, ir.Constant(i64, n)) for n in (4, _WIDTH[kind]))
    masked = _accumulate(
        builder, _offset(builder, w, w_rest), _offset(builder, x, x_rest), kind, sums, lanes_mask
    )
    builder.branch(end)

    builder.position_at_end(end)
    out = []
    for s, new in zip(sums, masked, strict=True):
        joined = builder.phi(vec)
        joined.add_incoming(s, after)
        joined.add_incoming(new, rest)
        out.append(joined)
    return out


def _totals8(builder: Any, sums: list[Any]) -> Any:
    """The totals of 8 vectors as one vector: :func:`total_of`'s order of additions, for all at once."""
    parts = [fold(builder, s, 8) for s in sums]  # 16 lanes to 8 each
    for width in (4, 2, 1):  # lanes that each total still spans after this round
        joined = []
        for a, b in zip(parts[0::2], parts[1::2], strict=True):
            # Both vectors hold totals spread over 2 * width adjacent lanes.
            low = [base + lane for base in range(0, 16, 2 * width) for lane in range(width)]
            high = [lane + width for lane in low]
            kind = ir.VectorType(i32, 8)
            joined.append(
                builder.fadd(
                    builder.shuffle_vector(a, b, ir.Constant(kind, low)),
                    builder.shuffle_vector(a, b, ir.Constant(kind, high)),
                )
            )
        parts = joined
    return parts[0]


def _emit_tile(builder: Any, rows: int, columns: int, kind: int, lines: int, values: tuple[Any, ...]) -> None:
    w, w_stride, x, x_stride, k, y, y_stride, following = values
    w_rows = [builder.add(w, builder.mul(w_stride, ir.Constant(i64, i))) for i in range(rows)]
    x_rows = [builder.add(x, builder.mul(x_stride, ir.Constant(i64, j))) for j in range(columns)]
    sums = _loop(builder, w_rows, x_rows, kind, k, following, lines)
    for j in range(columns):
        out = builder.add(y, builder.mul(y_stride, ir.Constant(i64, j)))
        mine = [sums[i * columns + j] for i in range(rows)]
        if rows == ROWS:
            builder.store(_totals8(builder, mine), pointer(builder, out, ir.VectorType(f32, 8)), align=4)
        else:
            assert rows == 1, rows
            builder.store(total_of(builder, mine[0]), pointer(builder, out, f32), align=4)


def _tile(rows: int, columns: int, kind: int, lines: int = 0) -> Callable[..., Any]:
    """An instruction: ``(w, w_stride, x, x_stride, k, y, y_stride, following)``, strides in bytes.

    It asks for ``lines`` cache lines from ``following`` on at every step of 16 along k.
    """

    @instruction(types.void, (_int,) * 8)
    def tile(builder: Any, *values: Any) -> None:
        _emit_tile(builder, rows, columns, kind, lines, values)

    return tile


# Hardware prefetching keeps up with float32 rows; it fell a third short for rows half as long.
_f32_81, _f32_82, _f32_83 = (_tile(8, n, F32) for n in (1, 2, 3))
_f32_83_ahead = _tile(8, 3, F32, 1)
_f32_11, _bf16_11, _f16_11 = (_tile(1, 1, kind) for kind in (F32, BF16, F16))
_bf16_81, _bf16_82, _bf16_83 = (_tile(8, n, BF16, 4) for n in (1, 2, 3))
_f16_81, _f16_82, _f16_83 = (_tile(8, n, F16, 4) for n in (1, 2, 3))
_i8_11 = _tile(1, 1, I8)
_i8_81, _i8_82, _i8_83 = (_tile(8, n, I8, 2) for n in (1, 2, 3))


@kernel
def _f32_tile(
    w: int, ws: int, x: int, xs: int, s: int, k: int, y: int, ys: int, following: int, ahead: int
) -> None:
    """All batch rows against 8 float32 weight rows; ``ahead`` bytes from ``following`` on come next."""
    j = 0
    while s - j >= 3:
        if ahead > 0:  # k lines of 16 values: what 4 * k bytes need
            _f32_83_ahead(w, ws, x + j * xs, xs, k, y + j * ys, ys, following)
            following += 4 * k
            ahead -= 4 * k
        else:
            _f32_83(w, ws, x + j * xs, xs, k, y + j * ys, ys, 0)
        j += 3
    if s - j == 2:
        _f32_82(w, ws, x + j * xs, xs, k, y + j * ys, ys, 0)
    elif s - j == 1:
        _f32_81(w, ws, x + j * xs, xs, k, y + j * ys, ys, 0)


@kernel
def _next_tile(w: int, ws: int, i: int, m: int, following: int) -> int:
    """Where the tile after the one at row ``i`` begins."""
    return w + (i + ROWS) * ws if i + 2 * ROWS <= m else following


def product_f32(
    w: int, ws: int, m: int, x: int, xs: int, s: int, k: int, y: int, ys: int, scratch: int, following: int,
    ready: int,
) -> None:  # fmt: skip
    """Float32 weights; see :data:`PRODUCT` for the arguments, of which scratch and ready are unused."""
    for i in range(0, m - m % ROWS, ROWS):
        then = _next_tile(w, ws, i, m, following)
        _f32_tile(w + i * ws, ws, x, xs, s, k, y + i * 4, ys, then, ROWS * 4 * k)
    for i in range(m - m % ROWS, m):
        for j in range(s):
            _f32_11(w + i * ws, ws, x + j * xs, xs, k, y + j * ys + i * 4, ys, 0)


@kernel
def _widen_bf16(w: int, k: int, out: int) -> None:
    whole = k - k % 16
    for at in range(0, whole, 16):
        store(out + 4 * at, load_bf16(w + 2 * at))
    if whole < k:
        store_first(out + 4 * whole, load_bf16_first(w + 2 * whole, k - whole), k - whole)


@kernel
def _widen_f16(w: int, k: int, out: int) -> None:
    whole = k - k % 16
    for at in range(0, whole, 16):
        store(out + 4 * at, load_f16(w + 2 * at))
    if whole < k:
        store_first(out + 4 * whole, load_f16_first(w + 2 * whole, k - whole), k - whole)


@kernel
def _widen_i8(w: int, k: int, out: int) -> None:
    whole = k - k % 16
    for at in range(0, whole, 16):
        store(out + 4 * at, load_i8(w + at))
    if whole < k:
        store_first(out + 4 * whole, load_i8_first(w + whole, k - whole), k - whole)


@kernel
def few_rows_bf16(w: int, ws: int, m: int, x: int, xs: int, s: int, k: int, y: int, ys: int) -> None:
    """Some bfloat16 weight rows without a scratch: what a larger tile leaves over."""
    for i in range(0, m - m % ROWS, ROWS):
        for j in range(0, s - s % COLUMNS, COLUMNS):
            _bf16_83(w + i * ws, ws, x + j * xs, xs, k, y + j * ys + i * 4, ys, 0)
        for j in range(s - s % COLUMNS, s):
            _bf16_81(w + i * ws, ws, x + j * xs, xs, k, y + j * ys + i * 4, ys, 0)
    for i in range(m - m % ROWS, m):
        for j in range(s):
            _bf16_11(w + i * ws, ws, x + j * xs, xs, k, y + j * ys + i * 4, ys, 0)


def product_bf16(
    w: int, ws: int, m: int, x: int, xs: int, s: int, k: int, y: int, ys: int, scratch: int, following: int,
    ready: int,
) -> None:  # fmt: skip
    """Bfloat16 weights; scratch holds 8 * k float32."""
    for i in range(0, m - m % ROWS, ROWS):
        then = _next_tile(w, ws, i, m, following)
        if s == 1:
            _bf16_81(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        elif s == 2:
            _bf16_82(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        elif s == 3:
            _bf16_83(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        else:
            for r in range(ROWS):
                _widen_bf16(w + (i + r) * ws, k, scratch + r * k * 4)
            _f32_tile(scratch, k * 4, x, xs, s, k, y + i * 4, ys, then, ROWS * 2 * k)
    for i in range(m - m % ROWS, m):
        for j in range(s):
            _bf16_11(w + i * ws, ws, x + j * xs, xs, k, y + j * ys + i * 4, ys, 0)


def product_f16(
    w: int, ws: int, m: int, x: int, xs: int, s: int, k: int, y: int, ys: int, scratch: int, following: int,
    ready: int,
) -> None:  # fmt: skip
    """Float16 weights; scratch holds 8 * k float32."""
    for i in range(0, m - m % ROWS, ROWS):
        then = _next_tile(w, ws, i, m, following)
        if s == 1:
            _f16_81(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        elif s == 2:
            _f16_82(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        elif s == 3:
            _f16_83(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        else:
            for r in range(ROWS):
                _widen_f16(w + (i + r) * ws, k, scratch + r * k * 4)
            _f32_tile(scratch, k * 4, x, xs, s, k, y + i * 4, ys, then, ROWS * 2 * k)
    for i in range(m - m % ROWS, m):
        for j in range(s):
            _f16_11(w + i * ws, ws, x + j * xs, xs, k, y + j * ys + i * 4, ys, 0)


def product_i8(
    w: int, ws: int, m: int, x: int, xs: int, s: int, k: int, y: int, ys: int, scratch: int, following: int,
    ready: int,
) -> None:  # fmt: skip
    """Int8 weights, whose scales are somebody else's; scratch holds 8 * k float32."""
    for i in range(0, m - m % ROWS, ROWS):
        then = _next_tile(w, ws, i, m, following)
        if s == 1:
            _i8_81(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        elif s == 2:
            _i8_82(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        elif s == 3:
            _i8_83(w + i * ws, ws, x, xs, k, y + i * 4, ys, then)
        else:
            for r in range(ROWS):
                _widen_i8(w + (i + r) * ws, k, scratch + r * k * 4)
            _f32_tile(scratch, k * 4, x, xs, s, k, y + i * 4, ys, then, ROWS * k)
    for i in range(m - m % ROWS, m):
        for j in range(s):
            _i8_11(w + i * ws, ws, x + j * xs, xs, k, y + j * ys + i * 4, ys, 0)


#: By the code of how weights are stored.
PRODUCTS = {F32: product_f32, BF16: product_bf16, F16: product_f16, I8: product_i8}


@instruction(types.void, (_int,) * 13)
def call_product(builder: Any, function: Any, *arguments: Any) -> None:
    """Call a product by its address."""
    kind = ir.FunctionType(ir.VoidType(), [i64] * 12)
    builder.call(builder.inttoptr(function, kind.as_pointer()), list(arguments))
