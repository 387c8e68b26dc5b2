"""The gated delta rule: every backend against its float64 definition, and that against a triangular solve."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from attention_inputs import DeltaCase, delta_matrix_form, run_packed, run_step
from backends import Backend
from inputs import EXACT, Precision, check
from torch import Tensor

from recurra.ops.delta import cpu, reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
REFERENCE = reference.gated_delta_rule_varlen
LENGTHS = (1, 0, 63, 16, 65, 3, 64)
STATES = (True, True, False, True, True, False, True)

forms = pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])


def _plain(
    case: DeltaCase, precision: Precision, lengths: tuple[int, ...], states: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: the loop in float32, the matrix form with products in 16 bits."""
    if precision.act == torch.float32:
        return run_packed(REFERENCE, case, precision, lengths, states, CPU)
    return delta_matrix_form(case.to(precision), lengths, states)


def _judge(
    backend: Backend,
    case: DeltaCase,
    precision: Precision = FP32,
    lengths: tuple[int, ...] = LENGTHS,
    states: tuple[bool, ...] = STATES,
    chunk: int = 64,
) -> None:
    op = backend.op("gated_delta_rule_varlen")
    got = run_packed(op, case, precision, lengths, states, backend.device, chunk=chunk)
    plain = _plain(case, precision, lengths, states)
    exact = run_packed(REFERENCE, case.rounded(precision), EXACT, lengths, states, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


def _draw(
    lengths: tuple[int, ...] = LENGTHS,
    heads: tuple[int, int] = (1, 2),
    dims: tuple[int, int] = (24, 20),
    **options: Any,
) -> DeltaCase:
    return DeltaCase.draw(sum(lengths), len(lengths), *heads, *dims, **options)


@forms
@pytest.mark.parametrize("norm", [False, True])
def test_definition_is_a_triangular_system(by_channel: bool, norm: bool) -> None:
    case = replace(_draw(by_channel=by_channel), norm=norm)
    case = case if norm else replace(case, k=case.k / 24**0.5)
    y, state = run_packed(REFERENCE, case, EXACT, LENGTHS, STATES, CPU)
    expected_y, expected_state = delta_matrix_form(case, LENGTHS, STATES)
    torch.testing.assert_close(y, expected_y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state, expected_state, rtol=1e-9, atol=1e-9)


@forms
@pytest.mark.parametrize(
    ("heads", "dims"), [((2, 2), (32, 64)), ((2, 6), (40, 48)), ((1, 2), (128, 128)), ((1, 2), (5, 3))]
)
def test_shapes(backend: Backend, by_channel: bool, heads: tuple[int, int], dims: tuple[int, int]) -> None:
    lengths, states = (1, 17, 35), (True, False, True)
    _judge(backend, _draw(lengths, heads, dims, by_channel=by_channel), FP32, lengths, states)


@forms
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(backend: Backend, by_channel: bool, act_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    if backend.interpreted and act_dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 as integers")
    _judge(backend, _draw(by_channel=by_channel), Precision(act_dtype, state_dtype))


@forms
@pytest.mark.parametrize("chunk", [16, 20, 100, 256])
def test_any_chunk_size(backend: Backend, by_channel: bool, chunk: int) -> None:
    lengths, states = (70, 33) if backend.interpreted else (200, 130), (True, False)
    _judge(backend, _draw(lengths, by_channel=by_channel), FP32, lengths, states, chunk)


@forms
def test_unnormalised_keys_and_decays_from_twenty_to_none(backend: Backend, by_channel: bool) -> None:
    """Corrections reach a hundred times the values, and sums of log decays -1000."""
    lengths, states = (64, 70) if backend.interpreted else (64, 130), (True, False)
    case = replace(_draw(lengths, (1, 1), (64, 32), by_channel=by_channel, lowest=-20.0), norm=False)
    case = replace(case, beta=1 - case.beta * 1e-3)
    _judge(backend, case, FP32, lengths, states)


@forms
def test_no_decay_at_all(backend: Backend, by_channel: bool) -> None:
    """The plain delta rule, with full corrections."""
    case = _draw(by_channel=by_channel)
    _judge(backend, replace(case, g=torch.zeros_like(case.g), beta=torch.ones_like(case.beta)))


@forms
@pytest.mark.parametrize("cuts", [(1,), (64,), (7, 63, 65, 100)], ids=str)
def test_split_anywhere_equals_whole(backend: Backend, by_channel: bool, cuts: tuple[int, ...]) -> None:
    """K 32, V 64, 130 tokens: as reported, a second chunk that reads the state with its axes swapped."""
    op = backend.op("gated_delta_rule_varlen")
    case = _draw((130,), (1, 1) if backend.interpreted else (2, 2), (32, 64), by_channel=by_channel)
    parts, state = [], case.to(FP32, backend.device).state
    for begin, end in pairwise((0, *cuts, 130)):
        part = case.tokens(slice(begin, end), state=state)
        y, state = run_packed(op, part, FP32, (end - begin,), (True,), backend.device, chunk=64)
        parts.append(y)
    plain = _plain(case, FP32, (130,), (True,))
    exact = run_packed(REFERENCE, case.rounded(FP32), EXACT, (130,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


@forms
def test_token_by_token_equals_whole(backend: Backend, by_channel: bool) -> None:
    case = _draw((9,), (2, 4), (32, 80), by_channel=by_channel)
    parts, state = [], case.to(FP32, backend.device).state
    for t in range(9):
        part = case.tokens(slice(t, t + 1), state=state)
        y, state = run_step(backend.op("gated_delta_rule_update"), part, FP32, backend.device)
        parts.append(y)
    plain = _plain(case, FP32, (9,), (True,))
    exact = run_packed(REFERENCE, case.rounded(FP32), EXACT, (9,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


@forms
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("value", [3, 64, 100])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_update_with_padding(
    backend: Backend,
    by_channel: bool,
    norm: bool,
    value: int,
    act_dtype: torch.dtype,
    state_dtype: torch.dtype,
) -> None:
    if backend.interpreted and torch.bfloat16 in (act_dtype, state_dtype):
        pytest.skip("Triton's interpreter truncates to bfloat16, at twice the error of rounding")
    precision = Precision(act_dtype, state_dtype)
    case = replace(_draw((1,) * 5, (1, 3), (40, value), by_channel=by_channel), norm=norm)
    got = run_step(backend.op("gated_delta_rule_update"), case, precision, backend.device, padding=3)
    plain = run_step(reference.gated_delta_rule_update, case, precision, CPU)
    exact = run_step(reference.gated_delta_rule_update, case.rounded(precision), EXACT, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@forms
def test_packed_equals_alone_in_any_slot(backend: Backend, by_channel: bool) -> None:
    """Bit for bit: a sequence's arithmetic depends neither on its neighbours nor on its slot."""
    op = backend.op("gated_delta_rule_varlen")
    lengths, states = (5, 3, 70 if backend.interpreted else 137), (True, False, True)
    case = _draw(lengths, (1, 2), (32, 32), by_channel=by_channel)
    packed, finals = run_packed(op, case, FP32, lengths, states, backend.device, chunk=64)
    order = torch.tensor([2, 4, 1], dtype=torch.int32, device=backend.device)
    elsewhere = run_packed(op, case, FP32, lengths, states, backend.device, chunk=64, slots=order)
    assert torch.equal(packed, elsewhere[0])
    assert torch.equal(finals, elsewhere[1])
    for s, (begin, end) in enumerate(((0, 5), (5, 8), (8, sum(lengths)))):
        alone = case.tokens(slice(begin, end), state=case.state[s : s + 1])
        y, state = run_packed(op, alone, FP32, (end - begin,), (s != 1,), backend.device, chunk=64)
        assert torch.equal(y, packed[begin:end])
        assert torch.equal(state[0], finals[s])


@forms
def test_a_row_alone_and_in_a_batch(backend: Backend, by_channel: bool) -> None:
    case = _draw((1,) * 62, (1, 2), (16, 80), by_channel=by_channel)
    op = backend.op("gated_delta_rule_update")
    batch, finals = run_step(op, case, FP32, backend.device)
    for row in (0, 61):
        alone = case.tokens(slice(row, row + 1), state=case.state[row : row + 1])
        y, state = run_step(op, alone, FP32, backend.device)
        assert torch.equal(y[0], batch[row])
        assert torch.equal(state[0], finals[row])


def test_a_state_with_its_axes_swapped_is_refused(backend: Backend) -> None:
    case = _draw((5,), (2, 2), (8, 12))
    for name, run in (("gated_delta_rule_varlen", run_packed), ("gated_delta_rule_update", run_step)):
        op = backend.op(name)
        where = ((5,), (True,)) if run is run_packed else ()
        one = case if where else case.tokens(slice(0, 1))
        swapped = replace(one, state=one.state.mT.contiguous())
        with pytest.raises(AssertionError, match=r"\(Hv, K, V\) is \(2, 8, 12\)"):
            run(op, swapped, FP32, *where, backend.device)


def test_a_needle_in_the_first_of_three_thousand_tokens_decides() -> None:
    """Two prompts that differ in one early value differ at the end, whole or in chunks of 2,048."""
    tokens = 3000
    case = DeltaCase.draw(tokens, 1, 1, 1, 16, 16, lowest=-1e-5)
    needle = replace(case, beta=case.beta * 1e-4)
    needle.beta[7] = 1.0
    other = replace(needle, v=needle.v.clone())
    other.v[7] += 5.0
    op, ends = cpu.gated_delta_rule_varlen, []
    for prompt in (needle, other):
        _, state = run_packed(op, prompt.tokens(slice(0, 2048)), FP32, (2048,), (False,), CPU, chunk=64)
        rest = prompt.tokens(slice(2048, None), state=state)
        _, state = run_packed(op, rest, FP32, (tokens - 2048,), (True,), CPU, chunk=64)
        ends.append(state)
    assert (ends[0] - ends[1]).norm() > 0.1 * ends[0].norm()
