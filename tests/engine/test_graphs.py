"""Padding, buffers and choice of size of recorded decode steps, with a recorder that only calls again."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from fakes import FakeModel
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.device import detect
from recurra.engine.forward import EagerForward
from recurra.engine.graphs import Buffers, Call, GraphForward, GraphLimits, graph_refusal, ladder
from recurra.ops import build
from recurra.types import Chunks, ForwardBatch

CPU = torch.device("cpu")
SLOTS = 9


def call_again(call: Call) -> tuple[Callable[[], None], Tensor]:
    out = call()

    @torch.inference_mode()
    def replay() -> None:
        out.copy_(call())

    return replay, out


def decode_step(tokens: list[int], slots: list[int]) -> ForwardBatch:
    narrow = torch.tensor([0], dtype=torch.int32)
    return ForwardBatch(
        token_ids=torch.tensor(tokens), positions=torch.tensor(tokens), slots=torch.tensor(slots, dtype=torch.int32),
        num_decode=len(tokens), cu_seqlens=narrow, has_state=torch.zeros(0, dtype=torch.bool), max_seqlen=0,
        chunks=Chunks(4, narrow[:0], narrow[:0], narrow[:0], narrow), logit_rows=torch.arange(len(tokens)),
        page_table=torch.zeros(len(tokens), 0, dtype=torch.int32),
        context_lens=torch.tensor(tokens, dtype=torch.int32), kv_rows=torch.zeros(0, dtype=torch.int64),
        max_context=max(tokens),
    )  # fmt: skip


def poisoned_pool(model: FakeModel, live: dict[int, float]) -> StatePool:
    pool = StatePool(model.state_specs, SLOTS, CPU)
    pool.layers[0].ssm.fill_(float("nan"))
    for slot, value in live.items():
        pool.layers[0].ssm[slot] = value
    return pool


@pytest.mark.parametrize("most", [1, 2, 3, 64, 65, 100, 256, 300])
def test_ladder_reaches_every_batch_and_not_past_the_largest(most: int) -> None:
    sizes = ladder(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for below, above in itertools.pairwise(sizes):
        assert above <= max(2 * below, below + 64)


@pytest.mark.parametrize("rows", range(1, 8))
def test_padded_steps_equal_eager_ones_and_touch_no_other_slot(rows: int) -> None:
    model = FakeModel()
    slots = [9, 2, 7, 4, 1, 8, 3][:rows]
    live = {slot: float(10 * slot) for slot in slots}
    pools = [poisoned_pool(model, live) for _ in range(2)]
    eager, graphs = (EagerForward(model, pool.layers) for pool in pools)
    recorded = GraphForward(graphs, Buffers.make(GraphLimits(7, 100, 0, CPU)), call_again)
    for size in recorded.missing:
        recorded.record(size)
    for step in range(3):
        batch = decode_step([5 + step + i for i in range(rows)], slots)
        assert torch.equal(recorded(batch), eager(batch)), step
        for slot in set(range(1, SLOTS + 1)) - set(slots):
            assert pools[1].layers[0].ssm[slot].isnan().all(), slot
    for slot in slots:
        assert torch.equal(pools[1].layers[0].ssm[slot], pools[0].layers[0].ssm[slot])


def test_a_smaller_step_after_a_larger_one_leaves_the_larger_ones_slots_alone() -> None:
    model = FakeModel()
    pool = poisoned_pool(model, {1: 1.0, 2: 2.0, 3: 3.0})
    recorded = GraphForward(
        EagerForward(model, pool.layers), Buffers.make(GraphLimits(4, 100, 0, CPU)), call_again
    )
    recorded(decode_step([5, 6, 7], [1, 2, 3]))
    held = pool.layers[0].ssm[3].clone()
    recorded(decode_step([8, 9], [1, 2]))
    recorded(decode_step([8, 9, 1], [1, 2, 0]))
    assert torch.equal(pool.layers[0].ssm[3], held)


def test_pages_are_padded_with_scratch_and_no_context() -> None:
    buffers = Buffers.make(GraphLimits(4, 40, 16, CPU))
    assert buffers.page_table.shape == (4, 3)
    for name in ("page_table", "context_lens", "kv_rows"):
        getattr(buffers, name).fill_(77)
    batch = decode_step([5, 6], [1, 2])
    paged = ForwardBatch(
        batch.token_ids, batch.positions, batch.slots, 2, batch.cu_seqlens, batch.has_state, 0, batch.chunks,
        batch.logit_rows, torch.tensor([[1], [2]], dtype=torch.int32), batch.context_lens, torch.tensor([21, 38]), 7,
    )  # fmt: skip
    buffers.fill(paged, 4)
    assert buffers.page_table[:, 0].tolist() == [1, 2, 0, 0]
    assert buffers.context_lens.tolist() == [5, 6, 0, 0]
    assert buffers.kv_rows.tolist() == [21, 38, 0, 0]
    assert buffers.batch(4).max_context == 40


def test_the_reference_backend_is_no_graph_and_says_so() -> None:
    reason = graph_refusal(build(detect("cpu"), "reference"), FakeModel().state_specs)
    assert reason is not None
    assert "reference" in reason
