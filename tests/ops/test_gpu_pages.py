"""Attention over pages on a real GPU: real head widths, every dtype, long contexts, graphs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from backends import Backend
from paged_inputs import Paged, Shape, check_dense, fill, run

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TRITON, TORCH = Backend("triton", GPU), Backend("torch", GPU)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {
    "32-8 of 128": Shape(32, 8, 128, 128, 64),
    "16-16 of 64": Shape(16, 16, 64, 64, 16),
    "20-5 of 80": Shape(20, 5, 80, 80, 64),
    "12-4 of 96": Shape(12, 4, 96, 96, 32),
    "14-2 of 112": Shape(14, 2, 112, 112, 64),
    "16-2 of 256": Shape(16, 2, 256, 256, 64),
    "MLA": Shape(8, 8, 192, 128, 64),
    "one of 256, window": Shape(10, 1, 256, 256, 64, window=600),
    "window and cap": Shape(16, 8, 128, 128, 64, window=77, softcap=30.0),
}
LENGTHS, CONTEXTS = (300, 1, 63, 64, 65, 257), (300, 700, 63, 1500, 65, 2111)


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", [TRITON, TORCH], ids=lambda b: b.name)
def test_pieces_at_real_shapes(backend: Backend, name: str, dtype: torch.dtype) -> None:
    case = Paged.draw(SHAPES[name], LENGTHS, CONTEXTS).to(dtype, GPU)
    cache = fill(case, backend.op("store_kv"))
    got = run(backend.op("attention_varlen"), case, cache)
    check_dense(got, case, name)
    assert torch.equal(run(backend.op("attention_varlen"), case, cache), got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("backend", [TRITON, TORCH], ids=lambda b: b.name)
def test_steps_at_real_shapes(backend: Backend, name: str, dtype: torch.dtype) -> None:
    contexts = (1, 63, 64, 65, 255, 257, 4096, 9001)
    case = Paged.draw(SHAPES[name], [1] * len(contexts), contexts).to(dtype, GPU)
    cache = fill(case, backend.op("store_kv"))
    got = run(backend.op("attention_update"), case, cache, padding=5)
    check_dense(got, case, name)
    one = case.only(6)
    assert torch.equal(run(backend.op("attention_update"), one, fill(one, seed=5), padding=0)[0], got[6])


def test_a_captured_step_serves_other_contexts() -> None:
    """The grid depends on nothing that changes: contexts and pages are read on the device."""
    shape = Shape(16, 4, 128, 128, 64)
    case = Paged.draw(shape, (1, 1), (3000, 40)).to(torch.bfloat16, GPU)
    cache, op = fill(case), TRITON.op("attention_update")
    contexts, table = cache.context_lens.clone(), cache.page_table.clone()
    held = replace(cache, context_lens=contexts, page_table=table)
    options = {**shape.options, "max_context": 1 << 20}

    def step() -> torch.Tensor:
        return op(case.q, held.k, held.v, table, contexts, **options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ((3000, 40), (1, 0), (2999, 39)):
        contexts.copy_(torch.tensor(lengths))
        graph.replay()
        want = step()
        assert torch.equal(out, want)
        assert torch.isfinite(out).all()
