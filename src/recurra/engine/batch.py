"""Plan to ForwardBatch: packed on the host, copied to the device at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurra.engine.scheduler import Plan, PrefillChunk
from recurra.engine.transfer import to_device
from recurra.types import SCRATCH_PAGE, Chunks, ForwardBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's tensors, and the rows that the runner looks at besides ``logit_rows``.

    Attributes:
        forward: what the model reads.
        last_rows: (num_decode + S,) int64, the last row of every sequence in the step.
    """

    forward: ForwardBatch
    last_rows: Tensor


def build(
    plan: Plan, chunk_size: int, device: torch.device, page_size: int = 0, unread: Tensor | None = None
) -> StepBatch:
    """Pack a plan: decode rows first, then the prompt pieces in order.

    Args:
        plan: a non-empty plan; every sequence in it has its slot, and its pages where there are any.
        chunk_size: Q, the kernel chunk: each piece is cut from its own first token of this step.
        device: where the tensors go.
        page_size: tokens of a page of keys and values; 0 in a model without attention.
        unread: (num_decode,) int64, the decode rows' tokens where these are on the device and not on the host
            yet: those of the step before, which isn't committed.
    """
    decode, prefill = plan.decode, plan.prefill
    ahead = int(unread is not None)
    tokens = [0 if ahead else s.token_ids[s.num_computed] for s in decode]
    positions = [s.num_computed + ahead for s in decode]
    slots = [s.slot for s in decode]
    contexts = [position + 1 for position in positions]
    for chunk in prefill:
        tokens.extend(chunk.sequence.token_ids[chunk.start : chunk.end])
        positions.extend(range(chunk.start, chunk.end))
        slots.append(chunk.sequence.slot)
        contexts.append(chunk.end)
    lengths = np.array([c.length for c in prefill], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    last = [*range(len(decode)), *(ends + (len(decode) - 1)).tolist()]
    wanted = [row for row, piece in zip(last[len(decode) :], prefill, strict=True) if piece.is_last]
    pages = _Pages.of(plan, page_size, positions)
    parts = _to_device(
        (tokens, positions, last, [*last[: len(decode)], *wanted], pages.rows),
        (slots, contexts, _bounds(ends), *_cut(lengths, chunk_size), pages.table.reshape(-1)),
        _continued(prefill),
        device,
    )
    forward = ForwardBatch(
        token_ids=parts[0] if unread is None else unread, positions=parts[1], slots=parts[5], num_decode=len(decode),
        cu_seqlens=parts[7], has_state=parts[13], max_seqlen=max(lengths.tolist(), default=0),
        chunks=Chunks(chunk_size, parts[8], parts[9], parts[10], parts[11]), logit_rows=parts[3],
        page_table=parts[12].view(pages.table.shape), context_lens=parts[6], kv_rows=parts[4],
        max_context=max(contexts),
    )  # fmt: skip
    return StepBatch(forward, parts[2])


@dataclass(frozen=True, slots=True)
class _Pages:
    """Pages of a plan's sequences, (rows, pages) int32, and each token's place in the flattened cache."""

    table: NDArray[np.int32]
    rows: NDArray[np.int64]

    @staticmethod
    def of(plan: Plan, page_size: int, positions: Sequence[int]) -> _Pages:
        sequences = [*plan.decode, *(chunk.sequence for chunk in plan.prefill)]
        if page_size == 0:
            return _Pages(np.zeros((len(sequences), 0), np.int32), np.zeros(0, np.int64))
        ends = [at + 1 for at in positions[: len(plan.decode)]] + [chunk.end for chunk in plan.prefill]
        widths = [-(-end // page_size) for end in ends]
        table = np.full((len(sequences), max(widths)), SCRATCH_PAGE, np.int32)
        for row, (sequence, width) in enumerate(zip(sequences, widths, strict=True)):
            assert len(sequence.pages) >= width, (sequence.pages, width, page_size)
            table[row, :width] = sequence.pages[:width]
        tokens = [1] * len(plan.decode) + [chunk.length for chunk in plan.prefill]
        at = np.array(positions)
        pages = table[np.repeat(np.arange(len(sequences)), tokens), at // page_size]
        return _Pages(table, pages.astype(np.int64) * page_size + at % page_size)


def prefill_part(batch: ForwardBatch) -> ForwardBatch:
    """The same step without its decode rows; nothing is copied."""
    cut = batch.num_decode
    return ForwardBatch(
        batch.token_ids[cut:], batch.positions[cut:], batch.slots[cut:], 0, batch.cu_seqlens,
        batch.has_state, batch.max_seqlen, batch.chunks, batch.logit_rows[:0], batch.page_table[cut:],
        batch.context_lens[cut:], batch.kv_rows[cut:], batch.max_context,
    )  # fmt: skip


def _bounds(ends: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate((np.zeros(1, np.int32), ends)).astype(np.int32)


def _continued(prefill: Iterable[PrefillChunk]) -> list[bool]:
    return [chunk.start > 0 for chunk in prefill]


def _cut(lengths: NDArray[np.int32], size: int) -> tuple[NDArray[np.int32], ...]:
    """Kernel chunks: (seq, start, length, cu_chunks), see :class:`recurra.types.Chunks`."""
    counts = -(-lengths // size)
    bounds = _bounds(np.cumsum(counts, dtype=np.int32))
    seq = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    within = (np.arange(bounds[-1], dtype=np.int32) - bounds[:-1][seq]) * size
    start = _bounds(np.cumsum(lengths, dtype=np.int32))[:-1][seq] + within
    return seq, start, np.minimum(size, lengths[seq] - within), bounds


_Column = Iterable[int] | NDArray[np.int32] | NDArray[np.int64]


def _to_device(
    wide: tuple[_Column, ...], narrow: tuple[_Column, ...], flags: Iterable[bool], device: torch.device
) -> list[Tensor]:
    """int64 columns, int32 columns and one bool column, in one buffer and one copy."""
    columns = [np.fromiter(c, np.int64) if isinstance(c, range) else np.asarray(c, np.int64) for c in wide]
    columns += [np.asarray(c, np.int32) for c in narrow]
    columns.append(np.asarray(flags, np.bool_))
    buffer = to_device(np.concatenate([c.view(np.uint8) for c in columns]), device)
    tensors, at = [], 0
    for column in columns:
        dtype = _DTYPES[column.dtype.char]
        tensors.append(buffer[at : at + column.nbytes].view(dtype))
        at += column.nbytes
    return tensors


_DTYPES = {"l": torch.int64, "q": torch.int64, "i": torch.int32, "?": torch.bool}
