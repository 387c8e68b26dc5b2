"""A decode step of Mamba-2 blocks as one job.

Phases of a block: in projection with the convolution of its x, B and C rows; recurrence, a head a chunk;
gated norm, a row a chunk; out projection; norm.
"""

from __future__ import annotations

from recurra.ops.conv1d.cpu_update import convolve
from recurra.ops.cpu.jit import kernel
from recurra.ops.cpu.threads import claim, finish, wait_done
from recurra.ops.cpu.vectors import get, real, splat, word
from recurra.ops.decode_stack.cpu_common import (
    A_MATRIX,
    BATCH,
    BLOCK_TABLE,
    BLOCK_WORDS,
    BLOCKS,
    CONV_BIAS,
    CONV_STATE,
    CONV_WEIGHT,
    CONV_WIDTH,
    GATED_EPS,
    GATED_GROUP,
    GATED_NORM,
    GROUPS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    IN_PROJ,
    IN_STEP,
    MIXED,
    NORMED,
    OUT_PROJ,
    OUT_STEP,
    SCRATCH,
    SCRATCH_BYTES,
    SKIP,
    SSM_STATE,
    STATE,
    STATE_BYTES,
    STEP_BIAS,
    STEP_HIGH,
    STEP_LOW,
    STORED,
    THREADS,
    WIDE,
    WIDE_BYTES,
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
from recurra.ops.ssm.cpu_update import clear, skip_and_gate, step_size, update_head, update_stored_head


@kernel
def _state_of_chunk(step: int, block: int, chunk: int) -> int:
    """Address of the state that a chunk of the recurrence updates."""
    H, size = word(block, HEADS), word(block, HEAD_DIM) * word(block, STATE)
    s = min(chunk // H, word(step, BATCH) - 1)
    return int(state_of(step, block, SSM_STATE, s) + word(block, STATE_BYTES) * (chunk % H) * size)


@kernel
def _project_in(step: int, block: int, rank: int, chunk: int, ready: int) -> None:
    S, hidden, rows = word(step, BATCH), word(step, HIDDEN), word(step, IN_STEP)
    wide, wide_bytes = word(step, WIDE), word(step, WIDE_BYTES)
    matrix = block + 8 * IN_PROJ
    first = chunk * rows
    last = min(first + rows, word(matrix, 3))
    out, scratch = wide + 4 * first, word(step, SCRATCH) + rank * word(step, SCRATCH_BYTES)
    following = chunk_after(step, matrix, first, rows, _state_of_chunk(step, block, rank))
    multiply(
        matrix, first, last - first, word(step, NORMED), 4 * hidden, S, out, wide_bytes, scratch, following,
        ready,
    )  # fmt: skip
    inner, W = word(block, HEADS) * word(block, HEAD_DIM), word(block, CONV_WIDTH)
    begin_conv = max(first, inner)  # rows are z, then x, B and C, then dt
    count = min(last, 2 * inner + 2 * word(block, GROUPS) * word(block, STATE)) - begin_conv
    if count > 0:
        c = begin_conv - inner
        weight, bias = word(block, CONV_WEIGHT) + 4 * c * W, word(block, CONV_BIAS)
        for s in range(S):
            x = wide + s * wide_bytes + 4 * begin_conv
            if is_padding(step, s):
                clear(x, count)
            else:
                window = state_of(step, block, CONV_STATE, s) + 4 * c * (W - 1)
                convolve(window, weight, bias + 4 * c if bias else 0, x, x, count, W, 1)


@kernel
def _recur(step: int, block: int, rank: int, chunk: int) -> None:
    H, P, N, G = word(block, HEADS), word(block, HEAD_DIM), word(block, STATE), word(block, GROUPS)
    s, h = chunk // H, chunk % H
    y = word(step, MIXED) + 4 * (s * H + h) * P
    if is_padding(step, s):
        clear(y, P)
    else:
        row = word(step, WIDE) + s * word(step, WIDE_BYTES)
        x = row + 4 * (H + h) * P
        B = row + 4 * (2 * H * P + h // (H // G) * N)
        raw = splat(get(row + 4 * (2 * H * P + 2 * G * N + h)))
        bias = splat(get(word(block, STEP_BIAS) + 4 * h))
        dt = step_size(raw, bias, 1, splat(real(block, STEP_LOW)), splat(real(block, STEP_HIGH)))
        state = state_of(step, block, SSM_STATE, s)
        following = chunk + word(step, THREADS)
        if following < word(step, BATCH) * H:
            following = _state_of_chunk(step, block, following)
        else:
            following = chunk_of(block + 8 * OUT_PROJ, word(step, OUT_STEP), rank)
        A = splat(get(word(block, A_MATRIX) + 4 * h))
        C, stored = B + 4 * G * N, word(block, STORED)
        if stored:
            work = word(step, SCRATCH) + rank * word(step, SCRATCH_BYTES)
            update_stored_head(stored, state, slot_of(step, s), h, x, dt, A, B, C, y, P, N, work)
        else:
            update_head(state + 4 * h * P * N, x, dt, A, B, C, y, P, N, following)
        skip_and_gate(y, x, word(block, SKIP) + 4 * h, 0, 0, P)


@kernel
def _norm_gated(step: int, block: int, s: int) -> None:
    inner, group = word(block, HEADS) * word(block, HEAD_DIM), word(block, GATED_GROUP)
    y, z = word(step, MIXED) + 4 * s * inner, word(step, WIDE) + s * word(step, WIDE_BYTES)
    if not is_padding(step, s):
        for c in range(0, inner, group):
            at, weight = y + 4 * c, word(block, GATED_NORM) + 4 * c
            norm_group(at, z + 4 * c, weight, at, group, real(block, GATED_EPS), 0)


@kernel
def _block(step: int, control: int, rank: int, ticket: int, base: int, index: int) -> int:
    S = word(step, BATCH)
    block = word(step, BLOCK_TABLE) + 8 * BLOCK_WORDS * index
    chunks = (word(block + 8 * IN_PROJ, 3) + word(step, IN_STEP) - 1) // word(step, IN_STEP)
    ready = 0
    while ticket < base + chunks:
        _project_in(step, block, rank, ticket - base, ready)
        ready = 1
        ticket = finish(control)
    base += chunks
    wait_done(control, base)
    chunks = S * word(block, HEADS)
    while ticket < base + chunks:
        _recur(step, block, rank, ticket - base)
        ticket = finish(control)
    base += chunks
    wait_done(control, base)
    while ticket < base + S:
        _norm_gated(step, block, ticket - base)
        ticket = finish(control)
    base += S
    wait_done(control, base)
    return end_block(step, control, rank, ticket, base, index)


@kernel
def _block_chunks(step: int, index: int) -> int:
    """How many chunks :func:`_block` counts."""
    block = word(step, BLOCK_TABLE) + 8 * BLOCK_WORDS * index
    chunks = (word(block + 8 * IN_PROJ, 3) + word(step, IN_STEP) - 1) // word(step, IN_STEP)
    return int(chunks + word(step, BATCH) * (word(block, HEADS) + 1) + end_block_chunks(step))


def mamba2_step(step: int, control: int, rank: int) -> None:
    """The job: embedding, every block, final norm."""
    ticket = begin(step, control, claim(control))
    base = word(step, BATCH)
    for index in range(word(step, BLOCKS)):
        ticket = _block(step, control, rank, ticket, base, index)
        base += _block_chunks(step, index)
