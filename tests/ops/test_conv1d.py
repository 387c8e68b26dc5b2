"""The causal convolution of every backend against its float64 definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from backends import Backend
from inputs import EXACT, ConvCase, Precision, check, run_conv, run_conv_update, tokens_of

from recurra.ops.conv1d import reference

CPU = torch.device("cpu")
LENGTHS = (1, 0, 3, 4, 37, 2, 16, 17)
STATES = (True, True, False, True, False, False, True, True)


def _judge(
    backend: Backend,
    case: ConvCase,
    precision: Precision,
    *,
    lengths: tuple[int, ...] = LENGTHS,
    states: tuple[bool, ...] = STATES,
    silu: bool = True,
    chunk: int = 16,
) -> None:
    op = backend.op("causal_conv1d_varlen")
    got = run_conv(op, case, precision, lengths, states, backend.device, silu=silu, chunk=chunk)
    plain = run_conv(reference.causal_conv1d_varlen, case, precision, lengths, states, CPU, silu=silu)
    exact = run_conv(
        reference.causal_conv1d_varlen, case.rounded(precision), EXACT, lengths, states, CPU, silu=silu
    )
    touched = [s for s, length in enumerate(lengths) if length or states[s]]
    check(got[0], plain[0], exact[0], "output")
    check(got[1][touched], plain[1][touched], exact[1][touched], "window")


def test_definition_is_torch_conv1d() -> None:
    case = ConvCase.draw(23, 1, 6, 4)
    y, window = run_conv(reference.causal_conv1d_varlen, case, EXACT, (23,), (False,), CPU, silu=False)
    expected = F.conv1d(F.pad(case.x.T[None], (3, 0)), case.weight[:, None], case.bias, groups=6)[0].T
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(window[0], case.x[-3:].T)


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_every_width_and_length(backend: Backend, width: int) -> None:
    precision = Precision(torch.float32, torch.float32)
    _judge(backend, ConvCase.draw(sum(LENGTHS), len(LENGTHS), 37, width), precision)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_of_input_and_window(
    backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype
) -> None:
    _judge(backend, ConvCase.draw(sum(LENGTHS), len(LENGTHS), 37, 4), Precision(act_dtype, state_dtype))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_optional_parts(backend: Backend, silu: bool, bias: bool) -> None:
    case = ConvCase.draw(sum(LENGTHS), len(LENGTHS), 9, 4, bias)
    _judge(backend, case, Precision(torch.float32, torch.float32), silu=silu)


def test_chunk_of_many_tiles(backend: Backend) -> None:
    """A kernel may cut a chunk further: 70 is no multiple of anything."""
    lengths, states = (150, 71, 70, 1), (True, False, True, False)
    case = ConvCase.draw(sum(lengths), 4, 5, 4)
    precision = Precision(torch.float32, torch.float32)
    _judge(backend, case, precision, lengths=lengths, states=states, chunk=70)


@pytest.mark.parametrize("cuts", [(1,), (2, 3), (6,), (1, 2, 3, 4, 5, 6, 7, 8)], ids=str)
def test_split_anywhere_equals_whole(backend: Backend, cuts: tuple[int, ...]) -> None:
    """Prefill 6 then 3 equals one call of 9: the window holds inputs, not outputs."""
    op = backend.op("causal_conv1d_varlen")
    precision = Precision(torch.float32, torch.float32)
    case = ConvCase.draw(9, 1, 11, 4)
    whole, window = run_conv(op, case, precision, (9,), (True,), backend.device)
    parts, state = [], case.to(precision, backend.device).state
    for begin, end in pairwise((0, *cuts, 9)):
        part = tokens_of(ConvCase(case.x, case.weight, case.bias, state), slice(begin, end))
        y, state = run_conv(op, part, precision, (end - begin,), (True,), backend.device)
        parts.append(y)
    plain = run_conv(reference.causal_conv1d_varlen, case, precision, (9,), (True,), CPU)[0]
    exact = run_conv(reference.causal_conv1d_varlen, case.rounded(precision), EXACT, (9,), (True,), CPU)[0]
    check(torch.cat(parts), plain, exact, "split")
    check(whole, plain, exact, "whole")
    assert torch.equal(state, window), "windows are copies of inputs: no rounding can differ"


def test_update_equals_prefill_of_one_token(backend: Backend) -> None:
    precision = Precision(torch.float32, torch.float32)
    case = ConvCase.draw(5, 5, 300, 4)
    y, window = run_conv_update(backend.op("causal_conv1d_update"), case, precision, backend.device)
    ones, kept = (1,) * 5, (True,) * 5
    exact = run_conv(reference.causal_conv1d_varlen, case.rounded(precision), EXACT, ones, kept, CPU)
    plain = run_conv(reference.causal_conv1d_varlen, case, precision, ones, kept, CPU)
    check(y, plain[0], exact[0], "output")
    assert torch.equal(window.cpu().double(), exact[1])


@pytest.mark.parametrize("width", [2, 3, 4, 5])
def test_update_dtypes_padding_and_options(backend: Backend, act_dtype: torch.dtype, width: int) -> None:
    op = backend.op("causal_conv1d_update")
    for state_dtype in (torch.float32, torch.bfloat16):
        for bias, silu in ((True, True), (False, False)):
            precision = Precision(act_dtype, state_dtype)
            case = ConvCase.draw(7, 7, 37, width, bias)
            got = run_conv_update(op, case, precision, backend.device, silu=silu, padding=3)
            plain = run_conv_update(reference.causal_conv1d_update, case, precision, CPU, silu=silu)
            exact = run_conv_update(
                reference.causal_conv1d_update, case.rounded(precision), EXACT, CPU, silu=silu
            )
            check(got[0], plain[0], exact[0], "output")
            check(got[1], plain[1], exact[1], "window")


def test_packed_equals_alone(backend: Backend) -> None:
    """Bit for bit: a sequence's arithmetic does not depend on its neighbours."""
    op = backend.op("causal_conv1d_varlen")
    precision = Precision(torch.float32, torch.float32)
    case = ConvCase.draw(25, 3, 10, 4)
    packed, windows = run_conv(op, case, precision, (5, 3, 17), (True, False, True), backend.device)
    for s, (begin, end) in enumerate(((0, 5), (5, 8), (8, 25))):
        alone = tokens_of(ConvCase(case.x, case.weight, case.bias, case.state[s : s + 1]), slice(begin, end))
        y, window = run_conv(op, alone, precision, (end - begin,), (s != 1,), backend.device)
        assert torch.equal(y, packed[begin:end])
        assert torch.equal(window[0], windows[s])
