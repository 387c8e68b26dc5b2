"""Plan to ForwardBatch: packed on the host, copied to the device at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurra.engine.scheduler import Plan, PrefillChunk
from recurra.types import Chunks, ForwardBatch


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's tensors, and the rows that the runner looks at besides ``logit_rows``.

    Attributes:
        forward: what the model reads.
        last_rows: (num_decode + S,) int64, the last row of every sequence in the step.
    """

    forward: ForwardBatch
    last_rows: Tensor


def build(plan: Plan, chunk_size: int, device: torch.device) -> StepBatch:
    """Pack a plan: decode rows first, then the prompt pieces in order.

    Args:
        plan: a non-empty plan; every sequence in it has its slot.
        chunk_size: Q, the kernel chunk: each piece is cut from its own first token of this step.
        device: where the tensors go.
    """
    decode, prefill = plan.decode, plan.prefill
    tokens = [s.token_ids[s.num_computed] for s in decode]
    positions = [s.num_computed for s in decode]
    slots = [s.slot for s in decode]
    if not prefill:
        rows = range(len(decode))
        parts = _to_device((tokens, positions, rows), (slots, (0,)), (), device)
        empty = parts[3][:0]
        forward = ForwardBatch(
            parts[0], parts[1], parts[3], len(decode), parts[4], parts[5], 0,
            Chunks(chunk_size, empty, empty, empty, parts[4]), parts[2],
        )  # fmt: skip
        return StepBatch(forward, parts[2])
    lengths = np.array([c.length for c in prefill], dtype=np.int32)
    ends = np.cumsum(lengths, dtype=np.int32)
    for chunk in prefill:
        tokens.extend(chunk.sequence.token_ids[chunk.start : chunk.end])
        positions.extend(range(chunk.start, chunk.end))
        slots.append(chunk.sequence.slot)
    last = [*range(len(decode)), *(ends + (len(decode) - 1)).tolist()]
    wanted = [row for row, piece in zip(last[len(decode) :], prefill, strict=True) if piece.is_last]
    cuts = _cut(lengths, chunk_size)
    parts = _to_device(
        (tokens, positions, last, [*last[: len(decode)], *wanted]),
        (slots, _bounds(ends), *cuts),
        _continued(prefill),
        device,
    )
    forward = ForwardBatch(
        token_ids=parts[0], positions=parts[1], slots=parts[4], num_decode=len(decode),
        cu_seqlens=parts[5], has_state=parts[10], max_seqlen=int(lengths.max()),
        chunks=Chunks(chunk_size, parts[6], parts[7], parts[8], parts[9]), logit_rows=parts[3],
    )  # fmt: skip
    return StepBatch(forward, parts[2])


def prefill_part(batch: ForwardBatch) -> ForwardBatch:
    """The same step without its decode rows; nothing is copied."""
    cut = batch.num_decode
    return ForwardBatch(
        batch.token_ids[cut:], batch.positions[cut:], batch.slots[cut:], 0, batch.cu_seqlens,
        batch.has_state, batch.max_seqlen, batch.chunks, batch.logit_rows[:0],
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


_Column = Iterable[int] | NDArray[np.int32]


def _to_device(
    wide: tuple[_Column, ...], narrow: tuple[_Column, ...], flags: Iterable[bool], device: torch.device
) -> list[Tensor]:
    """int64 columns, int32 columns and one bool column, in one buffer and one copy."""
    columns = [np.fromiter(c, np.int64) if isinstance(c, range) else np.asarray(c, np.int64) for c in wide]
    columns += [np.asarray(c, np.int32) for c in narrow]
    columns.append(np.asarray(flags, np.bool_))
    buffer = torch.from_numpy(np.concatenate([c.view(np.uint8) for c in columns])).to(device)
    tensors, at = [], 0
    for column in columns:
        dtype = _DTYPES[column.dtype.char]
        tensors.append(buffer[at : at + column.nbytes].view(dtype))
        at += column.nbytes
    return tensors


_DTYPES = {"l": torch.int64, "q": torch.int64, "i": torch.int32, "?": torch.bool}
