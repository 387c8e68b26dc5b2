"""The gated short convolution of every backend against its float64 definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from attention_inputs import ShortConvCase, run_packed, run_step
from backends import Backend
from inputs import EXACT, Precision, check

from recurra.ops.short_conv import reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
REFERENCE = reference.short_conv_varlen
LENGTHS = (1, 0, 3, 4, 37, 2, 16, 17, 63)
STATES = (True, True, False, True, False, False, True, True, False)
LIVE = [s for s, known in enumerate(STATES) if LENGTHS[s] or known]  # the others hold poison


def _judge(backend: Backend, case: ShortConvCase, precision: Precision, chunk: int = 16) -> None:
    op = backend.op("short_conv_varlen")
    got = run_packed(op, case, precision, LENGTHS, STATES, backend.device, chunk=chunk)
    plain = run_packed(REFERENCE, case, precision, LENGTHS, STATES, CPU)
    exact = run_packed(REFERENCE, case.rounded(precision), EXACT, LENGTHS, STATES, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1][LIVE], plain[1][LIVE], exact[1][LIVE], "window")


def _draw(channels: int = 37, width: int = 3, bias: bool = True) -> ShortConvCase:
    return ShortConvCase.draw(sum(LENGTHS), len(LENGTHS), channels, width, bias)


def test_definition_is_torch_conv1d_between_two_products() -> None:
    case = ShortConvCase.draw(23, 1, 6, 3)
    y, window = run_packed(REFERENCE, case, EXACT, (23,), (False,), CPU)
    u = case.B * case.x
    middle = F.conv1d(F.pad(u.T[None], (2, 0)), case.weight[:, None], case.bias, groups=6)[0].T
    torch.testing.assert_close(y, case.C * middle, rtol=1e-12, atol=1e-12)
    assert torch.equal(window[0], u[-2:].T)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
@pytest.mark.parametrize("bias", [False, True])
def test_every_width(backend: Backend, width: int, bias: bool) -> None:
    _judge(backend, _draw(width=width, bias=bias), FP32)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    if backend.interpreted and act_dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16, at twice the error of rounding")
    _judge(backend, _draw(), Precision(act_dtype, state_dtype))


def test_chunk_of_many_tiles(backend: Backend) -> None:
    _judge(backend, _draw(), FP32, chunk=70)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (6,), (1, 2, 3, 4, 5, 6, 7, 8)], ids=str)
def test_split_anywhere_equals_whole(backend: Backend, act_dtype: torch.dtype, cuts: tuple[int, ...]) -> None:
    """Windows hold the rounded products, so that a cut changes no window's bit in any dtype."""
    op = backend.op("short_conv_varlen")
    precision = Precision(act_dtype, act_dtype)
    case = ShortConvCase.draw(9, 1, 11, 3)
    whole, window = run_packed(op, case, precision, (9,), (True,), backend.device)
    parts, state = [], case.to(precision, backend.device).state
    for begin, end in pairwise((0, *cuts, 9)):
        part = case.tokens(slice(begin, end), state=state)
        y, state = run_packed(op, part, precision, (end - begin,), (True,), backend.device)
        parts.append(y)
    assert torch.equal(state, window)
    # The taps of a first tile come in another order when some are in the window: a rounding apart.
    exact = run_packed(REFERENCE, case.rounded(precision), EXACT, (9,), (True,), CPU)[0]
    plain = run_packed(REFERENCE, case, precision, (9,), (True,), CPU)[0]
    check(torch.cat(parts), plain, exact, "split")
    check(whole, plain, exact, "whole")


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_update_with_padding(backend: Backend, act_dtype: torch.dtype, width: int) -> None:
    op = backend.op("short_conv_update")
    for state_dtype, bias in ((torch.float32, True), (torch.bfloat16, False)):
        precision = Precision(act_dtype, state_dtype)
        case = ShortConvCase.draw(7, 7, 37, width, bias)
        got = run_step(op, case, precision, backend.device, padding=3)
        plain = run_step(reference.short_conv_update, case, precision, CPU)
        exact = run_step(reference.short_conv_update, case.rounded(precision), EXACT, CPU)
        check(got[0], plain[0], exact[0], "output")
        check(got[1], plain[1], exact[1], "window")


def test_token_by_token_equals_whole(backend: Backend) -> None:
    case = ShortConvCase.draw(9, 1, 300, 3)
    parts, state = [], case.to(FP32, backend.device).state
    for t in range(9):
        part = case.tokens(slice(t, t + 1), state=state)
        y, state = run_step(backend.op("short_conv_update"), part, FP32, backend.device)
        parts.append(y)
    plain = run_packed(REFERENCE, case, FP32, (9,), (True,), CPU)
    exact = run_packed(REFERENCE, case.rounded(FP32), EXACT, (9,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "output")
    assert torch.equal(state.cpu(), plain[1])


def test_packed_equals_alone_in_any_slot(backend: Backend) -> None:
    """Bit for bit: a sequence's arithmetic depends neither on its neighbours nor on its slot."""
    op = backend.op("short_conv_varlen")
    case = ShortConvCase.draw(25, 3, 10, 3)
    lengths, states = (5, 3, 17), (True, False, True)
    packed, windows = run_packed(op, case, FP32, lengths, states, backend.device)
    order = torch.tensor([2, 4, 1], dtype=torch.int32, device=backend.device)
    elsewhere = run_packed(op, case, FP32, lengths, states, backend.device, slots=order)
    assert torch.equal(packed, elsewhere[0])
    assert torch.equal(windows, elsewhere[1])
    for s, (begin, end) in enumerate(((0, 5), (5, 8), (8, 25))):
        alone = case.tokens(slice(begin, end), state=case.state[s : s + 1])
        y, window = run_packed(op, alone, FP32, (end - begin,), (s != 1,), backend.device)
        assert torch.equal(y, packed[begin:end])
        assert torch.equal(window[0], windows[s])
