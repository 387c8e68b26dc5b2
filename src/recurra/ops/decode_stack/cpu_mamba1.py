"""A decode step of Mamba-1 blocks (FalconMamba's norms included) as one job.

Phases of a block: in projection with the convolution of its x rows; x projection; FalconMamba's norms, a
row a chunk, if there are any; dt projection with the recurrence and the gate; out projection; norm.
"""

from __future__ import annotations

from recurra.ops.conv1d.cpu_update import convolve
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.threads import claim, finish, wait_done
from recurra.ops.cpu.vectors import real, word
from recurra.ops.decode_stack.cpu_common import (
    A_MATRIX,
    BATCH,
    BCDT_EPS,
    BCDT_NORMS,
    BLOCK_TABLE,
    BLOCK_WORDS,
    BLOCKS,
    CONV_BIAS,
    CONV_STATE,
    CONV_WEIGHT,
    CONV_WIDTH,
    HIDDEN,
    IN_PROJ,
    IN_STEP,
    INNER,
    MIXED,
    NARROW,
    NARROW_BYTES,
    NORMED,
    OUT_PROJ,
    OUT_STEP,
    RANK,
    SCRATCH,
    SCRATCH_BYTES,
    SKIP,
    SSM_STATE,
    STATE,
    STEP_BIAS,
    STEP_PROJ,
    STEPS,
    STORED,
    WIDE,
    WIDE_BYTES,
    X_PROJ,
    begin,
    chunk_after,
    chunk_of,
    end_block,
    end_block_chunks,
    is_padding,
    slot_of,
    state_of,
)
from recurra.ops.linear.cpu import multiply
from recurra.ops.norm.cpu import norm_group
from recurra.ops.ssm.cpu_update import (
    clear,
    skip_and_gate,
    step_sizes,
    update_channels,
    update_stored_channels,
)

_X_ROWS = 16  # rows of an x projection's chunk
_CHANNELS = 32  # channels of a chunk of the recurrence


@kernel
def _project_in(step: int, block: int, scratch: int, rank: int, chunk: int, ready: int) -> None:
    S, hidden, rows, inner = word(step, BATCH), word(step, HIDDEN), word(step, IN_STEP), word(block, INNER)
    wide, wide_bytes = word(step, WIDE), word(step, WIDE_BYTES)
    first = chunk * rows
    matrix = block + 8 * IN_PROJ
    following = chunk_after(step, matrix, first, rows, chunk_of(block + 8 * X_PROJ, _X_ROWS, rank))
    rows, out = min(rows, 2 * inner - first), wide + 4 * first
    multiply(
        matrix, first, rows, word(step, NORMED), 4 * hidden, S, out, wide_bytes, scratch, following, ready
    )
    count, W = min(rows, inner - first), word(block, CONV_WIDTH)
    if count > 0:
        weight, bias = word(block, CONV_WEIGHT) + 4 * first * W, word(block, CONV_BIAS)
        for s in range(S):
            x = wide + s * wide_bytes + 4 * first
            if is_padding(step, s):
                clear(x, count)
            else:
                window = state_of(step, block, CONV_STATE, s) + 4 * first * (W - 1)
                convolve(window, weight, bias + 4 * first if bias else 0, x, x, count, W, 1)


@kernel
def _project_x(step: int, block: int, scratch: int, rank: int, chunk: int, ready: int) -> None:
    matrix = block + 8 * X_PROJ
    first = chunk * _X_ROWS
    following = chunk_after(step, matrix, first, _X_ROWS, chunk_of(block + 8 * STEP_PROJ, _CHANNELS, rank))
    rows = min(_X_ROWS, word(matrix, 3) - first)
    out = word(step, NARROW) + 4 * first
    multiply(
        matrix, first, rows, word(step, WIDE), word(step, WIDE_BYTES), word(step, BATCH), out,
        word(step, NARROW_BYTES), scratch, following, ready,
    )  # fmt: skip


@kernel
def _norm_bcdt(step: int, block: int, s: int) -> None:
    at = word(step, NARROW) + s * word(step, NARROW_BYTES)
    rank, N, eps = word(block, RANK), word(block, STATE), real(block, BCDT_EPS)
    norm_group(at, 0, 0, at, rank, eps, 0)
    norm_group(at + 4 * rank, 0, 0, at + 4 * rank, N, eps, 0)
    norm_group(at + 4 * (rank + N), 0, 0, at + 4 * (rank + N), N, eps, 0)


@kernel
def _recur(step: int, block: int, scratch: int, rank: int, chunk: int, ready: int) -> None:
    S, inner, N, rank = word(step, BATCH), word(block, INNER), word(block, STATE), word(block, RANK)
    narrow, narrow_bytes = word(step, NARROW), word(step, NARROW_BYTES)
    c = chunk * _CHANNELS
    count = min(_CHANNELS, inner - c)
    steps = word(step, STEPS) + 4 * c
    following = chunk_of(block + 8 * OUT_PROJ, word(step, OUT_STEP), rank)
    following = chunk_after(step, block + 8 * STEP_PROJ, c, _CHANNELS, following)
    multiply(
        block + 8 * STEP_PROJ, c, count, narrow, narrow_bytes, S, steps, 4 * inner, scratch, following, ready
    )
    bias, A, D = word(block, STEP_BIAS), word(block, A_MATRIX), word(block, SKIP)
    for s in range(S):
        y = word(step, MIXED) + 4 * (s * inner + c)
        if is_padding(step, s):
            clear(y, count)
        else:
            dt = steps + 4 * s * inner
            step_sizes(dt, bias + 4 * c, dt, count, 1, -float("inf"), float("inf"))
            x = word(step, WIDE) + s * word(step, WIDE_BYTES) + 4 * c
            B = narrow + s * narrow_bytes + 4 * rank
            state, C, rates = state_of(step, block, SSM_STATE, s), B + 4 * N, A + 4 * c * N
            stored = word(block, STORED)
            if stored:
                slot = slot_of(step, s)
                update_stored_channels(stored, state, slot, c, x, dt, rates, B, C, y, count, N, scratch)
            else:
                update_channels(state + 4 * c * N, x, dt, rates, B, C, y, count, N)
            skip_and_gate(y, x, D + 4 * c, 1, x + 4 * inner, count)


@kernel
def _block(step: int, control: int, rank: int, ticket: int, base: int, index: int) -> int:
    block = word(step, BLOCK_TABLE) + 8 * BLOCK_WORDS * index
    scratch = word(step, SCRATCH) + rank * word(step, SCRATCH_BYTES)
    chunks = (2 * word(block, INNER) + word(step, IN_STEP) - 1) // word(step, IN_STEP)
    ready = 0
    while ticket < base + chunks:
        _project_in(step, block, scratch, rank, ticket - base, ready)
        ready = 1
        ticket = finish(control)
    base += chunks
    wait_done(control, base)
    chunks = (word(block, RANK) + 2 * word(block, STATE) + _X_ROWS - 1) // _X_ROWS
    ready = 0
    while ticket < base + chunks:
        _project_x(step, block, scratch, rank, ticket - base, ready)
        ready = 1
        ticket = finish(control)
    base += chunks
    wait_done(control, base)
    if word(block, BCDT_NORMS):
        while ticket < base + word(step, BATCH):
            _norm_bcdt(step, block, ticket - base)
            ticket = finish(control)
        base += word(step, BATCH)
        wait_done(control, base)
    chunks = (word(block, INNER) + _CHANNELS - 1) // _CHANNELS
    ready = 0
    while ticket < base + chunks:
        _recur(step, block, scratch, rank, ticket - base, ready)
        ready = 1
        ticket = finish(control)
    base += chunks
    wait_done(control, base)
    return end_block(step, control, rank, ticket, base, index)


@kernel
def _block_chunks(step: int, index: int) -> int:
    """How many chunks :func:`_block` counts."""
    block = word(step, BLOCK_TABLE) + 8 * BLOCK_WORDS * index
    inner, narrow = word(block, INNER), word(block, RANK) + 2 * word(block, STATE)
    chunks = (2 * inner + word(step, IN_STEP) - 1) // word(step, IN_STEP) + (narrow + _X_ROWS - 1) // _X_ROWS
    chunks += (inner + _CHANNELS - 1) // _CHANNELS + end_block_chunks(step)
    chunks += word(step, BATCH) if word(block, BCDT_NORMS) else 0
    return int(chunks)


def mamba1_step(step: int, control: int, rank: int) -> None:
    """The job: embedding, every block, final norm."""
    ticket = begin(step, control, claim(control))
    base = word(step, BATCH)
    for index in range(word(step, BLOCKS)):
        ticket = _block(step, control, rank, ticket, base, index)
        base += _block_chunks(step, index)
