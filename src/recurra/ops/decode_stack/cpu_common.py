"""The parts of a compiled decode step that both families share: tables, embedding, norms and matrices.

A step is one job. Its arguments are two tables of int64 words: one for the step, and one row for each
block, which both families lay out alike as far as they agree.
"""

from __future__ import annotations

from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.threads import finish, wait_done
from recurra.ops.cpu.tiles import load_some, store_some
from recurra.ops.cpu.vectors import (
    BF16,
    F32,
    LANES,
    add,
    load,
    load_bf16,
    load_bf16_first,
    load_f16,
    load_f16_first,
    load_first,
    real,
    slot_at,
    store,
    store_first,
    word,
)
from recurra.ops.linear.cpu import multiply
from recurra.ops.norm.cpu import norm_group

# Words of the step's table.
(
    BATCH, HIDDEN, TOKEN_IDS, SLOTS, EMBEDDING, EMBEDDING_KIND, EMBEDDING_BYTES, FINAL_NORM, FINAL_EPS, OUT,
    RESIDUAL, NORMED, WIDE, NARROW, STEPS, MIXED, SCRATCH, SCRATCH_BYTES, BLOCKS, BLOCK_TABLE, WIDE_BYTES,
    NARROW_BYTES, IN_STEP, OUT_STEP, THREADS,
) = range(25)  # fmt: skip

# Words of a block's row. A matrix takes six (see recurra.ops.linear.cpu.matrix_words).
(NORM, NORM_EPS, CONV_WEIGHT, CONV_BIAS, CONV_WIDTH, CONV_STATE, CONV_SLOT, SSM_STATE, SSM_SLOT) = range(9)
A_MATRIX, SKIP, STEP_BIAS = 9, 10, 11
IN_PROJ, OUT_PROJ, X_PROJ, STEP_PROJ = 12, 18, 24, 30
(INNER, STATE, RANK, BCDT_NORMS, BCDT_EPS) = range(36, 41)  # Mamba-1
(HEADS, HEAD_DIM, GROUPS, STEP_LOW, STEP_HIGH, GATED_NORM, GATED_EPS, GATED_GROUP) = range(41, 49)  # Mamba-2
STORED, STATE_BYTES = 49, 50  # a narrow state's words (0: float32), and bytes of a number
BLOCK_WORDS = 51


@kernel
def _widen_row(source: int, kind: int, out: int, count: int) -> None:
    whole = count - count % LANES
    for c in range(0, whole, LANES):
        if kind == F32:
            store(out + 4 * c, load(source + 4 * c))
        elif kind == BF16:
            store(out + 4 * c, load_bf16(source + 2 * c))
        else:
            store(out + 4 * c, load_f16(source + 2 * c))
    left = count - whole
    if left:
        if kind == F32:
            store_first(out + 4 * whole, load_first(source + 4 * whole, left), left)
        elif kind == BF16:
            store_first(out + 4 * whole, load_bf16_first(source + 2 * whole, left), left)
        else:
            store_first(out + 4 * whole, load_f16_first(source + 2 * whole, left), left)


@kernel
def begin_row(step: int, blocks: int, s: int) -> None:
    """Look a token up and leave its residual, and the first block's norm of it."""
    hidden = word(step, HIDDEN)
    source = word(step, EMBEDDING) + word(word(step, TOKEN_IDS), s) * word(step, EMBEDDING_BYTES)
    residual = word(step, RESIDUAL) + 4 * s * hidden
    _widen_row(source, word(step, EMBEDDING_KIND), residual, hidden)
    out = word(step, NORMED) + 4 * s * hidden
    norm_group(residual, 0, word(blocks, NORM), out, hidden, real(blocks, NORM_EPS), 0)


@kernel
def norm_next(step: int, blocks: int, block: int, s: int) -> None:
    """The norm that follows a block: the next block's, or the final one into the step's output."""
    hidden = word(step, HIDDEN)
    residual = word(step, RESIDUAL) + 4 * s * hidden
    if block + 1 == word(step, BLOCKS):
        out, weight, eps = word(step, OUT), word(step, FINAL_NORM), real(step, FINAL_EPS)
    else:
        row = blocks + 8 * BLOCK_WORDS * (block + 1)
        out, weight, eps = word(step, NORMED), word(row, NORM), real(row, NORM_EPS)
    norm_group(residual, 0, weight, out + 4 * s * hidden, hidden, eps, 0)


@kernel
def begin(step: int, control: int, ticket: int) -> int:
    """The first phase: a chunk a row. Returns the thread's next ticket."""
    while ticket < word(step, BATCH):
        begin_row(step, word(step, BLOCK_TABLE), ticket)
        ticket = finish(control)
    wait_done(control, word(step, BATCH))
    return ticket


@kernel
def chunk_after(step: int, matrix: int, first: int, rows: int, otherwise: int) -> int:
    """Where a thread will probably read next: threads take chunks in turns, then go to ``otherwise``."""
    row = first + word(step, THREADS) * rows
    return int(word(matrix, 0) + row * word(matrix, 2) if row < word(matrix, 3) else otherwise)


@kernel
def chunk_of(matrix: int, rows: int, rank: int) -> int:
    """Where the thread's first chunk of a matrix will probably begin."""
    return int(word(matrix, 0) + rank * rows * word(matrix, 2))


@kernel
def project_out(step: int, block: int, rank: int, chunk: int, last: int, ready: int) -> None:
    """Rows of the out projection, added to the residual; ``last``: whether no block follows."""
    S, hidden, rows = word(step, BATCH), word(step, HIDDEN), word(step, OUT_STEP)
    matrix = block + 8 * OUT_PROJ
    first = chunk * rows
    next_block = block + 8 * (BLOCK_WORDS + IN_PROJ) if last == 0 else block + 8 * IN_PROJ
    following = chunk_after(step, matrix, first, rows, chunk_of(next_block, word(step, IN_STEP), rank))
    rows = min(rows, hidden - first)
    columns = word(matrix, 4)
    out = word(step, NORMED) + 4 * first
    scratch = word(step, SCRATCH) + rank * word(step, SCRATCH_BYTES)
    multiply(
        matrix, first, rows, word(step, MIXED), 4 * columns, S, out, 4 * hidden, scratch, following, ready
    )
    for s in range(S):
        for c in range(0, rows, LANES):
            at = 4 * (s * hidden + c)
            residual = word(step, RESIDUAL) + 4 * first + at
            store_some(residual, add(load_some(residual, rows - c), load_some(out + at, rows - c)), rows - c)


@kernel
def end_block(step: int, control: int, rank: int, ticket: int, base: int, block: int) -> int:
    """The last two phases of a block: out projection with residual, then the next norm."""
    blocks = word(step, BLOCK_TABLE)
    row = blocks + 8 * BLOCK_WORDS * block
    chunks = (word(step, HIDDEN) + word(step, OUT_STEP) - 1) // word(step, OUT_STEP)
    ready = 0
    while ticket < base + chunks:
        project_out(step, row, rank, ticket - base, int(block + 1 == word(step, BLOCKS)), ready)
        ready = 1
        ticket = finish(control)
    base += chunks
    wait_done(control, base)
    while ticket < base + word(step, BATCH):
        norm_next(step, blocks, block, ticket - base)
        ticket = finish(control)
    wait_done(control, base + word(step, BATCH))
    return ticket


@kernel
def end_block_chunks(step: int) -> int:
    """How many chunks :func:`end_block` counts."""
    return int((word(step, HIDDEN) + word(step, OUT_STEP) - 1) // word(step, OUT_STEP) + word(step, BATCH))


@kernel
def is_padding(step: int, s: int) -> bool:
    """Whether row ``s`` belongs to nobody."""
    return bool(slot_at(word(step, SLOTS), s) == 0)


@kernel
def slot_of(step: int, s: int) -> int:
    """The slot of row ``s``."""
    return int(slot_at(word(step, SLOTS), s))


@kernel
def state_of(step: int, block: int, which: int, s: int) -> int:
    """Address of the state (CONV_STATE or SSM_STATE) of row ``s``; the word after is a slot's bytes."""
    return int(word(block, which) + slot_at(word(step, SLOTS), s) * word(block, which + 1))
