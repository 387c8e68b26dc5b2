"""Plans become tensors: every field against a plain construction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recurra.engine.batch import build, prefill_part
from recurra.engine.scheduler import Plan, PrefillChunk
from recurra.sampling_params import SamplingParams
from recurra.types import Request, Sequence, Status

CPU = torch.device("cpu")


def sequence(slot: int, prompt: int, answer: int = 0) -> Sequence:
    ids = [10 * slot + i for i in range(prompt + answer)]
    request = Request(str(slot), tuple(ids[:prompt]), SamplingParams())
    return Sequence(
        request, 0, ids, num_computed=max(0, prompt + answer - 1), slot=slot, status=Status.RUNNING
    )


PIECES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 13), st.integers(0, 4)), max_size=4)


@given(st.integers(0, 3), PIECES, st.integers(1, 6))
def test_every_field(num_decode: int, pieces: list[tuple[int, int, int]], size: int) -> None:
    if not num_decode and not pieces:
        return
    decode = tuple(sequence(1 + i, 3, 1 + i) for i in range(num_decode))
    chunks = []
    for i, (start, length, rest) in enumerate(pieces):
        one = sequence(1 + num_decode + i, start + length + rest)
        chunks.append(PrefillChunk(one, start, length, (one,)))
    step = build(Plan((), decode, tuple(chunks)), size, CPU)
    batch = step.forward
    tokens = [s.token_ids[-1] for s in decode]
    positions = [len(s.token_ids) - 1 for s in decode]
    bounds, last, wanted = [0], list(range(num_decode)), list(range(num_decode))
    cuts: list[tuple[int, int, int]] = []
    cu_chunks = [0]
    for i, chunk in enumerate(chunks):
        tokens += chunk.sequence.token_ids[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        cuts += [(i, bounds[-1] + at, min(size, chunk.length - at)) for at in range(0, chunk.length, size)]
        cu_chunks.append(len(cuts))
        bounds.append(bounds[-1] + chunk.length)
        last.append(num_decode + bounds[-1] - 1)
        if chunk.is_last:
            wanted.append(last[-1])
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == [s.slot for s in decode] + [c.sequence.slot for c in chunks]
    assert batch.num_decode == num_decode
    assert batch.cu_seqlens.tolist() == bounds
    assert batch.has_state.tolist() == [c.start > 0 for c in chunks]
    assert batch.max_seqlen == max((c.length for c in chunks), default=0)
    assert batch.logit_rows.tolist() == wanted
    assert step.last_rows.tolist() == last
    got = zip(
        batch.chunks.seq.tolist(), batch.chunks.start.tolist(), batch.chunks.length.tolist(), strict=True
    )
    assert list(got) == cuts
    assert batch.chunks.cu_chunks.tolist() == cu_chunks
    assert batch.chunks.size == size
    for wide in (batch.token_ids, batch.positions, batch.logit_rows, step.last_rows):
        assert wide.dtype is torch.int64
    narrow = (batch.slots, batch.cu_seqlens, batch.chunks.seq, batch.chunks.start, batch.chunks.length)
    assert all(t.dtype is torch.int32 for t in (*narrow, batch.chunks.cu_chunks))
    assert batch.has_state.dtype is torch.bool


def test_the_prefill_part_is_the_step_without_its_decode_rows() -> None:
    decode = (sequence(1, 2, 1), sequence(2, 2, 2))
    one = sequence(3, 7)
    batch = build(Plan((), decode, (PrefillChunk(one, 2, 5, (one,)),)), 2, CPU).forward
    part = prefill_part(batch)
    assert part.num_decode == 0
    assert part.token_ids.tolist() == one.token_ids[2:7]
    assert part.slots.tolist() == part.prefill_slots.tolist() == [3]
    assert part.cu_seqlens.tolist() == [0, 5]
    assert part.chunks.length.tolist() == [2, 2, 1]


@pytest.mark.gpu
def test_one_copy_reaches_the_gpu() -> None:
    one = sequence(1, 7)
    plan = Plan((), (sequence(2, 2, 1),), (PrefillChunk(one, 2, 5, (one,)),))
    here, there = build(plan, 2, CPU).forward, build(plan, 2, torch.device("cuda")).forward
    for name in ("token_ids", "positions", "slots", "cu_seqlens", "has_state", "logit_rows"):
        assert getattr(there, name).device.type == "cuda"
        assert getattr(there, name).tolist() == getattr(here, name).tolist()


@given(st.integers(0, 3), PIECES, st.sampled_from([1, 2, 8]), st.booleans())
def test_pages(num_decode: int, pieces: list[tuple[int, int, int]], page: int, ahead: bool) -> None:
    """Every token's place, and the table's padding; a step ahead is one position further."""
    pieces = [] if ahead else pieces
    if not num_decode and not pieces:
        return
    sequences = [sequence(1 + i, 3, 1 + i) for i in range(num_decode)]
    sequences += [sequence(1 + num_decode + i, sum(piece)) for i, piece in enumerate(pieces)]
    for s in sequences:
        s.pages = [100 * s.slot + i for i in range(len(s.token_ids) // page + 2)]
    chunks = tuple(
        PrefillChunk(s, start, length, (s,))
        for s, (start, length, _) in zip(sequences[num_decode:], pieces, strict=True)
    )
    unread = torch.arange(num_decode) if ahead else None
    batch = build(Plan((), tuple(sequences[:num_decode]), chunks), 4, CPU, page, unread).forward
    spans = [(s.num_computed + ahead, s.num_computed + ahead + 1) for s in sequences[:num_decode]]
    spans += [(c.start, c.end) for c in chunks]
    places = [
        s.pages[at // page] * page + at % page
        for s, span in zip(sequences, spans, strict=True)
        for at in range(*span)
    ]
    assert batch.kv_rows.tolist() == places
    assert batch.context_lens.tolist() == [end for _, end in spans]
    assert batch.max_context == max(end for _, end in spans)
    for row, s, (_, end) in zip(batch.page_table.tolist(), sequences, spans, strict=True):
        used = -(-end // page)
        assert row[:used] == s.pages[:used]
        assert not any(row[used:])
    if ahead:
        assert batch.token_ids is unread
