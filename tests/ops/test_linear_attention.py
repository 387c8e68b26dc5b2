"""Lightning attention: every backend against its float64 definition, and that against the matrix form."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from attention_inputs import LightningCase, lightning_matrix_form, run_packed, run_step
from backends import Backend
from inputs import EXACT, Precision, check
from torch import Tensor

from recurra.ops.linear_attention import cpu, reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
REFERENCE = reference.lightning_attention_varlen
LENGTHS = (1, 0, 63, 64, 65, 16, 17, 3, 130)
STATES = (True, True, False, True, True, False, False, True, False)


def _plain(
    case: LightningCase, precision: Precision, lengths: tuple[int, ...], states: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: the loop in float32, the matrix form with products in 16 bits."""
    if precision.act == torch.float32:
        return run_packed(REFERENCE, case, precision, lengths, states, CPU)
    return lightning_matrix_form(case.to(precision), lengths, states)


def _judge(
    backend: Backend,
    case: LightningCase,
    precision: Precision = FP32,
    lengths: tuple[int, ...] = LENGTHS,
    states: tuple[bool, ...] = STATES,
    chunk: int = 64,
) -> None:
    op = backend.op("lightning_attention_varlen")
    got = run_packed(op, case, precision, lengths, states, backend.device, chunk=chunk)
    plain = _plain(case, precision, lengths, states)
    exact = run_packed(REFERENCE, case.rounded(precision), EXACT, lengths, states, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


def _draw(
    lengths: tuple[int, ...] = LENGTHS, heads: int = 4, key: int = 24, value: int = 20
) -> LightningCase:
    return LightningCase.draw(sum(lengths), len(lengths), heads, key, value)


def test_definition_is_the_matrix_form() -> None:
    case = _draw()
    y, state = run_packed(REFERENCE, case, EXACT, LENGTHS, STATES, CPU)
    expected_y, expected_state = lightning_matrix_form(case, LENGTHS, STATES)
    torch.testing.assert_close(y, expected_y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, expected_state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("heads", "key", "value"), [(4, 32, 64), (3, 80, 48), (2, 128, 128), (2, 5, 3)])
def test_shapes(backend: Backend, heads: int, key: int, value: int) -> None:
    lengths, states = (1, 17, 70), (True, False, True)
    _judge(backend, _draw(lengths, heads, key, value), FP32, lengths, states)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    if backend.interpreted and act_dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 as integers")
    _judge(backend, _draw(), Precision(act_dtype, state_dtype))


@pytest.mark.parametrize("chunk", [16, 20, 64, 100, 256])
def test_any_chunk_size(backend: Backend, chunk: int) -> None:
    _judge(backend, _draw(), chunk=chunk)


def test_no_decay_and_decay_to_nothing(backend: Backend) -> None:
    """Rates 0 and -200: a state kept whole, and one whose exponent underflows."""
    case = replace(_draw(heads=2), log_decay=torch.tensor([0.0, -200.0], dtype=torch.float64))
    _judge(backend, case)


@pytest.mark.parametrize("cuts", [(1,), (64,), (7, 63, 65, 100)], ids=str)
def test_split_anywhere_equals_whole(backend: Backend, cuts: tuple[int, ...]) -> None:
    op = backend.op("lightning_attention_varlen")
    case = _draw((130,))
    parts, state = [], case.to(FP32, backend.device).state
    for begin, end in pairwise((0, *cuts, 130)):
        part = case.tokens(slice(begin, end), state=state)
        y, state = run_packed(op, part, FP32, (end - begin,), (True,), backend.device, chunk=64)
        parts.append(y)
    plain = _plain(case, FP32, (130,), (True,))
    exact = run_packed(REFERENCE, case.rounded(FP32), EXACT, (130,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


def test_token_by_token_equals_whole(backend: Backend) -> None:
    case = _draw((9,), 4, 32, 80)
    parts, state = [], case.to(FP32, backend.device).state
    for t in range(9):
        part = case.tokens(slice(t, t + 1), state=state)
        y, state = run_step(backend.op("lightning_attention_update"), part, FP32, backend.device)
        parts.append(y)
    plain = _plain(case, FP32, (9,), (True,))
    exact = run_packed(REFERENCE, case.rounded(FP32), EXACT, (9,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


@pytest.mark.parametrize("value", [3, 64, 100])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_update_with_padding(
    backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype, value: int
) -> None:
    if backend.interpreted and state_dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, at twice the error of rounding")
    precision = Precision(act_dtype, state_dtype)
    if backend.interpreted and act_dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, at twice the error of rounding")
    case = _draw((1,) * 5, 3, 40, value)
    got = run_step(backend.op("lightning_attention_update"), case, precision, backend.device, padding=3)
    plain = run_step(reference.lightning_attention_update, case, precision, CPU)
    exact = run_step(reference.lightning_attention_update, case.rounded(precision), EXACT, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


def test_packed_equals_alone_in_any_slot(backend: Backend) -> None:
    """Bit for bit: a sequence's arithmetic depends neither on its neighbours nor on its slot."""
    op = backend.op("lightning_attention_varlen")
    lengths, states = (5, 3, 137), (True, False, True)
    case = _draw(lengths, 2, 32, 32)
    packed, finals = run_packed(op, case, FP32, lengths, states, backend.device, chunk=64)
    order = torch.tensor([2, 4, 1], dtype=torch.int32, device=backend.device)
    elsewhere = run_packed(op, case, FP32, lengths, states, backend.device, chunk=64, slots=order)
    assert torch.equal(packed, elsewhere[0])
    assert torch.equal(finals, elsewhere[1])
    for s, (begin, end) in enumerate(((0, 5), (5, 8), (8, 145))):
        alone = case.tokens(slice(begin, end), state=case.state[s : s + 1])
        y, state = run_packed(op, alone, FP32, (end - begin,), (s != 1,), backend.device, chunk=64)
        assert torch.equal(y, packed[begin:end])
        assert torch.equal(state[0], finals[s])


def test_a_row_alone_and_in_a_batch(backend: Backend) -> None:
    case = _draw((1,) * 62, 2, 16, 80)
    op = backend.op("lightning_attention_update")
    batch, finals = run_step(op, case, FP32, backend.device)
    for row in (0, 61):
        alone = case.tokens(slice(row, row + 1), state=case.state[row : row + 1])
        y, state = run_step(op, alone, FP32, backend.device)
        assert torch.equal(y[0], batch[row])
        assert torch.equal(state[0], finals[row])


def test_a_state_with_its_axes_swapped_is_refused(backend: Backend) -> None:
    case = _draw((5,), 2, 8, 12)
    for name, run in (("lightning_attention_varlen", run_packed), ("lightning_attention_update", run_step)):
        op = backend.op(name)
        where = ((5,), (True,)) if run is run_packed else ()
        one = case if where else case.tokens(slice(0, 1))
        swapped = replace(one, state=one.state.mT.contiguous())
        with pytest.raises(AssertionError, match=r"\(H, K, V\) is \(2, 8, 12\)"):
            run(op, swapped, FP32, *where, backend.device)


def test_forty_four_thousand_tokens_stay_finite() -> None:
    """The closed form of the last state and output needs no recurrence."""
    tokens = 43_884
    case = LightningCase.draw(tokens, 1, 1, 64, 64, strongest=1.0)
    y, state = run_packed(cpu.lightning_attention_varlen, case, FP32, (tokens,), (False,), CPU, chunk=64)
    assert torch.isfinite(y).all()
    exact = case.rounded(FP32)
    left = torch.exp(exact.log_decay * torch.arange(tokens - 1, -1, -1, dtype=torch.float64))
    expected = (exact.k[:, 0] * left[:, None]).T @ exact.v[:, 0]
    torch.testing.assert_close(state[0, 0].double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        y[-1, 0].double(), case.scale * exact.q[-1, 0] @ expected, rtol=1e-4, atol=1e-4
    )
