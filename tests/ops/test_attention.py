"""Attention over pages: every backend against plain attention in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from backends import Backend
from paged_inputs import Paged, Shape, check_dense, fill, run

CPU = torch.device("cpu")
SHAPES = {
    "grouped": Shape(),
    "one head each": Shape(heads=2, key_heads=2, key=8, value=8, page=4),
    "one key head": Shape(heads=5, key_heads=1, key=80, value=80, page=16),
    "window": Shape(window=13),
    "window below a page": Shape(window=3),
    "window of one": Shape(window=1, page=4),
    "softcap": Shape(softcap=1.5),
    "softcap and window": Shape(softcap=4.0, window=9, page=4),
    "softcap of 30": Shape(key=64, value=64, softcap=30.0),
    "wide keys": Shape(heads=3, key_heads=3, key=24, value=16),
    "pages of one": Shape(page=1, key=20, value=20),
}
#: 1, page - 1, page, page + 1 and more, new and continued: (tokens of the piece, tokens with it)
PIECES = ((1, 1), (7, 7), (8, 8), (9, 9), (1, 20), (4, 16), (5, 37), (33, 33))


def _skip_truncation(backend: Backend, dtype: torch.dtype) -> None:
    if backend.interpreted and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, at twice the error of rounding")


@pytest.mark.parametrize("name", SHAPES)
def test_pieces_of_prompts(backend: Backend, act_dtype: torch.dtype, name: str) -> None:
    _skip_truncation(backend, act_dtype)
    lengths, contexts = zip(*(PIECES[::2] if backend.interpreted else PIECES), strict=True)
    case = Paged.draw(SHAPES[name], lengths, contexts).to(act_dtype, backend.device)
    cache = fill(case, backend.op("store_kv"))
    got = run(backend.op("attention_varlen"), case, cache)
    check_dense(got, case, name)
    assert got.dtype == act_dtype


@pytest.mark.parametrize("name", SHAPES)
def test_one_new_token_of_each_sequence_with_padding(
    backend: Backend, act_dtype: torch.dtype, name: str
) -> None:
    _skip_truncation(backend, act_dtype)
    contexts = (1, 8, 33) if backend.interpreted else (1, 7, 8, 9, 20, 16, 37, 33)
    case = Paged.draw(SHAPES[name], [1] * len(contexts), contexts).to(act_dtype, backend.device)
    cache = fill(case, backend.op("store_kv"))
    got = run(backend.op("attention_update"), case, cache, padding=3)
    check_dense(got, case, name)
    assert got.dtype == act_dtype


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (700, 0.0), (0, 2.0)])
def test_contexts_of_several_pieces(backend: Backend, window: int, softcap: float) -> None:
    """Longer than what one program or one unit of work takes."""
    shape = Shape(key=16, value=32, page=64, window=window, softcap=softcap)
    contexts = (257, 900) if backend.interpreted else (1023, 1024, 1025, 2500)
    case = Paged.draw(shape, [1] * len(contexts), contexts).to(torch.float32, backend.device)
    got = run(backend.op("attention_update"), case, padding=1)
    check_dense(got, case, "steps")
    pieces = Paged.draw(shape, (66, 3), (700, 300)).to(torch.float32, backend.device)
    got = run(backend.op("attention_varlen"), pieces)
    check_dense(got, pieces, "pieces")


def test_large_scores_do_not_overflow(backend: Backend) -> None:
    case = Paged.draw(Shape(), (9, 1), (40, 33)).to(torch.float32, backend.device)
    case = replace(case, q=case.q * 300)
    for op, part, padding in (("attention_varlen", case, -1), ("attention_update", case.only(1), 0)):
        got = run(backend.op(op), part, padding=padding)
        check_dense(got, part, op)


def test_packed_equals_alone_in_any_pages(backend: Backend) -> None:
    """Bit for bit: neighbours, places of pages and width of the table are no matter."""
    pieces = PIECES[::3] if backend.interpreted else PIECES
    lengths, contexts = zip(*pieces, strict=True)
    ones = (1,) * len(pieces)
    for op, sizes, padding in (("attention_varlen", lengths, -1), ("attention_update", ones, 0)):
        case = Paged.draw(Shape(key=24, value=24), sizes, contexts).to(torch.float32, backend.device)
        packed = run(backend.op(op), case, fill(case, seed=1), padding)
        assert torch.equal(run(backend.op(op), case, fill(case, seed=2, spare=0), padding), packed)
        for s, part in enumerate(packed.split(sizes)):
            one = case.only(s)
            assert torch.equal(run(backend.op(op), one, fill(one, seed=3), padding), part), (op, s)


def test_a_step_equals_a_piece_of_one_token(backend: Backend) -> None:
    case = Paged.draw(Shape(window=11), (1, 1, 1), (1, 16, 45)).to(torch.float32, backend.device)
    step = run(backend.op("attention_update"), case, padding=0)
    piece = run(backend.op("attention_varlen"), case)
    torch.testing.assert_close(step, piece, rtol=1e-5, atol=1e-6)


def test_keys_and_values_kept_in_fewer_bits(backend: Backend) -> None:
    """Caches in bfloat16 beside float32 queries: exact but for the rounding of what is stored."""
    case = Paged.draw(Shape(key=40, value=24), (9, 1), (20, 33)).to(torch.float32, backend.device)
    rounded = Paged(case.shape, case.lengths, case.contexts, case.q, case.k.bfloat16(), case.v.bfloat16())
    cache = fill(rounded)
    exact = Paged(case.shape, case.lengths, case.contexts, case.q, rounded.k.float(), rounded.v.float())
    want = exact.to(torch.float64).dense()
    got = run(backend.op("attention_varlen"), exact, cache)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    step = run(backend.op("attention_update"), exact.only(1), fill(rounded.only(1)), 0)
    torch.testing.assert_close(step.double(), want[9:], rtol=1e-5, atol=1e-5)


def test_nothing_to_do(backend: Backend) -> None:
    case = Paged.draw(Shape(), (1,), (1,)).to(torch.float32, backend.device)
    cache = fill(case)
    none = case.q[:0]
    out = backend.op("attention_update")(
        none, cache.k, cache.v, cache.page_table[:0], cache.context_lens[:0], max_context=0, scale=1.0
    )
    assert out.shape == (0, 4, 16)
    out = backend.op("attention_varlen")(
        none, cache.k, cache.v, cache.page_table[:0], cache.cu_seqlens[:1], cache.context_lens[:0],
        max_seqlen=0, max_context=0, scale=1.0,
    )  # fmt: skip
    assert out.shape == (0, 4, 16)
    before = cache.k.clone()
    backend.op("store_kv")(
        case.k[:0], case.v[:0], cache.k, cache.v, torch.zeros(0, dtype=torch.int64, device=cache.k.device)
    )
    assert torch.equal(before, cache.k) or (before.isnan() == cache.k.isnan()).all()
