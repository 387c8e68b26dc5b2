"""A step with several tokens: as many one-token steps, wherever memory is read from and written to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from backends import Backend
from inputs import EXACT, ConvCase, Precision, ScanCase, SSDCase, bounds, check, fused
from torch import Tensor

from recurra.ops.rounding import stochastic
from recurra.ops.rounding.reference import load
from recurra.ops.several import reference
from recurra.ops.ssm import reference as ssm

LENGTHS = (1, 3, 0, 2, 2)
SLOTS = 9


def _ints(values: Any, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def _windows(case: ConvCase, length: int, time_first: bool, device: torch.device) -> Tensor:
    """Windows of L inputs, NaN in slots that nobody reads, in either layout."""
    channels = case.weight.shape[0]
    shape = (SLOTS, length, channels) if time_first else (SLOTS, channels, length)
    state = torch.full(shape, float("nan"), dtype=case.state.dtype, device=device)
    view = state.transpose(1, 2) if time_first else state
    view[1:6] = case.state.to(device)
    return view


@pytest.mark.parametrize("time_first", [False, True], ids=["channels_first", "time_first"])
@pytest.mark.parametrize("speculate", [False, True], ids=["plain", "accepted"])
@pytest.mark.parametrize(("width", "longer"), [(4, 2), (2, 2), (5, 4), (4, 0)])
def test_conv(backend: Backend, width: int, longer: int, speculate: bool, time_first: bool) -> None:
    if speculate and longer == 0:
        pytest.skip("three tokens need room for three")
    op = backend.op("causal_conv1d_update_varlen")
    precision = Precision(torch.float32, torch.float32)
    length, channels = width - 1 + longer, 37
    drawn = ConvCase.draw(sum(LENGTHS), 5, channels, width)
    # Half the usual weights: the interpreter warns where silu's exponential overflows, though its value is right.
    drawn = replace(
        drawn, weight=drawn.weight / 2, state=torch.randn(5, channels, length, dtype=torch.float64)
    )
    answers = []
    for function, case, device in (
        (op, drawn.to(precision, backend.device), backend.device),
        (reference.causal_conv1d_update_varlen, drawn.rounded(precision), torch.device("cpu")),
    ):
        state = _windows(case, length, time_first, device)
        (x,) = fused(case.x)
        sources = _ints([1, 2, 3, 4, 5], device)
        targets = _ints([1, 7, 3, -1, 8], device)
        accepted = _ints([1, 2, 1, 3, 1], device) if speculate else None
        y = function(
            x, case.weight, case.bias, state, bounds(LENGTHS, device), sources, targets, accepted, silu=True
        )
        answers.append((y.cpu(), state.cpu().clone()))
    (y, state), (exact, exact_state) = answers
    check(y, exact.float(), exact, "output")
    assert torch.equal(state.isnan(), exact_state.isnan())
    torch.testing.assert_close(state, exact_state.float(), equal_nan=True, rtol=0, atol=0)


def test_conv_takes_back_what_was_refused(backend: Backend) -> None:
    """Guess three tokens, accept one, go on: the same as never having guessed the other two."""
    op = backend.op("causal_conv1d_update_varlen")
    device, channels, width = backend.device, 5, 4
    case = ConvCase.draw(6, 1, channels, width).to(Precision(torch.float32, torch.float32), device)
    state = torch.zeros(2, channels, width - 2 + 3, device=device)
    state[1, :, : width - 1] = case.state[0]
    slot, cu = _ints([1], device), bounds((3,), device)
    op(case.x[:3], case.weight, case.bias, state, cu, slot, slot, _ints([1], device), silu=False)
    y = op(case.x[3:], case.weight, case.bias, state, cu, slot, slot, _ints([1], device), silu=False)
    plain = torch.zeros(2, channels, width - 1, device=device)
    plain[1] = case.state[0]
    real = torch.cat([case.x[:1], case.x[3:]])
    expected = op(
        real, case.weight, case.bias, plain, bounds((4,), device), slot, slot, None, silu=False
    )  # fmt: skip
    torch.testing.assert_close(y, expected[1:], rtol=1e-5, atol=1e-4)


def test_conv_padding(backend: Backend) -> None:
    """Padding rows read and write nothing, whichever slot marks them; slot 0 is one like others with pad -1."""
    op = backend.op("causal_conv1d_update_varlen")
    device = backend.device
    case = ConvCase.draw(3, 1, 5, 4).to(Precision(torch.float32, torch.float32), device)
    for pad, slots, live in ((0, [0, 1, -1], 1), (-1, [-1, 0, -1], 0)):
        state = torch.full((2, 5, 3), float("nan"), device=device)
        state[live] = case.state[0]
        marks = _ints(slots, device)
        y = op(
            case.x,
            case.weight,
            None,
            state,
            bounds((1, 1, 1), device),
            marks,
            marks,
            None,
            silu=False,
            pad_slot=pad,
        )
        assert not y[0].any()
        assert not y[2].any()
        assert y[1].isfinite().all()
        assert y[1].any()
        assert state[1 - live].isnan().all()
        assert torch.equal(state[live, :, 2], case.x[1])


def _case(form: str, optional: bool = True) -> ScanCase | SSDCase:
    tokens = sum(LENGTHS)
    if form == "mamba1":
        return ScanCase.draw(tokens, 5, 37, 5, optional=optional)
    return SSDCase.draw(tokens, 5, 4, 6, 2, 5, optional=optional, wide_skip=form == "wide")


_TARGETS = ([1, 0, 0], [6, 2, 7], [0, 0, 0], [-1, 8, 0], [-1, -1, -1])


def _step(function: Any, case: Any, state: Tensor, device: torch.device, **options: Any) -> Tensor:
    x, dt, B, C = fused(case.x, case.dt, case.B, case.C)
    out: Tensor = function(
        state, x, dt, case.A, B, C, case.D, case.z, case.dt_bias, bounds(LENGTHS, device),
        _ints([1, 2, 3, 4, 5], device), _ints(_TARGETS, device), **options,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("optional", [True, False], ids=["all", "bare"])
@pytest.mark.parametrize("form", ["mamba1", "mamba2", "wide"])
def test_states(backend: Backend, form: str, optional: bool, act_dtype: torch.dtype) -> None:
    op = backend.op("selective_state_update_varlen")
    precision = Precision(act_dtype, torch.bfloat16 if act_dtype == torch.bfloat16 else torch.float32)
    drawn = _case(form, optional)
    answers = []
    for function, case, device in (
        (op, drawn.to(precision, backend.device), backend.device),
        (reference.selective_state_update_varlen, drawn.to(precision), torch.device("cpu")),
        (reference.selective_state_update_varlen, drawn.rounded(precision), torch.device("cpu")),
    ):
        state = torch.full(
            (SLOTS, *case.state.shape[1:]), float("nan"), dtype=case.state.dtype, device=device
        )
        state[1:6] = case.state
        y = _step(function, case, state, device)
        answers.append((y.cpu(), state.cpu()))
    (y, state), (plain, plain_state), (exact, exact_state) = answers
    check(y, plain, exact, "output")
    assert torch.equal(state.isnan(), exact_state.isnan())
    check(state.nan_to_num(), plain_state.nan_to_num(), exact_state.nan_to_num(), "states")


def test_several_tokens_are_as_many_steps() -> None:
    """The definition against the one-token definition."""
    case = _case("mamba2").to(EXACT)
    state = torch.zeros(SLOTS, *case.state.shape[1:], dtype=torch.float64)
    state[1:6] = case.state
    lone = state.clone()
    y = _step(reference.selective_state_update_varlen, case, state, torch.device("cpu"))
    for t, target in ((1, 6), (2, 2), (3, 7)):
        row, slot = slice(t, t + 1), torch.tensor([2])
        out = ssm.selective_state_update(
            lone, case.x[row], case.dt[row], case.A, case.B[row], case.C[row], case.D, case.z[row], case.dt_bias,
            slot,
        )  # fmt: skip
        torch.testing.assert_close(out, y[row])
        torch.testing.assert_close(lone[2], state[target])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_narrow_states_are_rounded_once_where_they_are_kept(backend: Backend, dtype: torch.dtype) -> None:
    op = backend.op("selective_state_update_varlen")
    device = backend.device
    rounding = stochastic(7, device)
    case = _case("mamba2").to(Precision(torch.float32, torch.float32), device)
    wide = torch.zeros(SLOTS, *case.state.shape[1:], device=device)
    state = torch.zeros(wide.shape, device=device).to(dtype)
    scale = torch.ones(wide.shape[:-1], dtype=torch.bfloat16, device=device)
    options = {"state_scale": None if dtype == torch.float16 else scale, "rounding": rounding}
    y = _step(op, case, state, device, **options)
    exact = _step(reference.selective_state_update_varlen, case, wide, device)
    torch.testing.assert_close(y, exact, rtol=1e-4, atol=1e-4)
    slots = _ints([1, 6, 2, 7, 8], device)
    kept = load(state, options["state_scale"], slots, torch.float32)
    step = {torch.float16: 2**-10, torch.float8_e4m3fn: 2**-3, torch.int8: 2 / 127}[dtype]
    largest = wide[slots.long()].abs().amax(-1, keepdim=True)
    assert ((kept - wide[slots.long()]).abs() <= step * largest + 1e-6).all()
    assert kept.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_padding_of_states(backend: Backend, dtype: torch.dtype) -> None:
    op = backend.op("selective_state_update_varlen")
    device = backend.device
    case = SSDCase.draw(3, 1, 2, 4, 1, 4).to(Precision(torch.float32, torch.float32), device)
    for pad, slots, live in ((0, [0, 1, -1], 1), (-1, [-1, 0, -1], 0)):
        state = torch.full((2, *case.state.shape[1:]), float("nan"), device=device).to(dtype)
        state[live] = case.state[0].to(dtype)
        before = state[live].float().clone()
        scale = torch.ones(state.shape[:-1], dtype=torch.bfloat16, device=device)
        marks = _ints(slots, device)
        y = op(
            state, case.x, case.dt, case.A, case.B, case.C, case.D, None, case.dt_bias, bounds((1, 1, 1), device),
            marks, marks[:, None], pad_slot=pad, state_scale=None if dtype == torch.float32 else scale,
        )  # fmt: skip
        assert not y[0].any()
        assert not y[2].any()
        assert y[1].isfinite().all()
        assert y[1].any()
        assert state[1 - live].float().isnan().all()
        assert not torch.equal(state[live].float(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("act", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_real_shapes(act: torch.dtype) -> None:
    """A window of four tokens on a layer of Codestral, each state kept; then Mamba-1."""
    from recurra.ops.several.triton import selective_state_update_varlen

    gpu, precision = torch.device("cuda"), Precision(act, torch.float32)
    rows, tokens = 8, 4
    cu = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32)
    sources = torch.arange(1, rows + 1, dtype=torch.int32)
    targets = torch.arange(rows + 1, rows + 1 + rows * tokens, dtype=torch.int32).view(rows, tokens)
    for drawn in (
        SSDCase.draw(rows * tokens, rows, 128, 64, 8, 128), ScanCase.draw(rows * tokens, rows, 8192, 16),
        SSDCase.draw(rows * tokens, rows, 4, 80, 2, 48), SSDCase.draw(rows * tokens, rows, 4, 112, 2, 96),
    ):  # fmt: skip
        answers = []
        for function, case in (
            (selective_state_update_varlen, drawn.to(precision, gpu)),
            (reference.selective_state_update_varlen, drawn.to(precision, gpu)),
            (reference.selective_state_update_varlen, drawn.rounded(precision).to(EXACT, gpu)),
        ):
            state = torch.zeros(
                1 + rows * (1 + tokens), *case.state.shape[1:], dtype=case.state.dtype, device=gpu
            )
            state[1 : rows + 1] = case.state
            y = function(
                state, case.x, case.dt, case.A, case.B, case.C, case.D, case.z, case.dt_bias, cu.to(gpu),
                sources.to(gpu), targets.to(gpu),
            )  # fmt: skip
            answers.append((y, state))
        check(answers[0][0], answers[1][0], answers[2][0], "output")
        check(answers[0][1], answers[1][1], answers[2][1], "states")


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements() -> None:
    from recurra.ops.several.triton import causal_conv1d_update_varlen, selective_state_update_varlen

    gpu = torch.device("cuda")
    case = SSDCase.draw(2, 1, 128, 64, 8, 128).to(Precision(torch.bfloat16, torch.float32), gpu)
    cu = torch.tensor([0, 2], dtype=torch.int32, device=gpu)
    answers = []
    for slots in (2200, 4):
        state = torch.zeros(slots, 128, 64, 128, dtype=torch.bfloat16, device=gpu)
        assert slots == 4 or state.numel() > 2**31
        state[slots - 1] = case.state[0].bfloat16()
        y = selective_state_update_varlen(
            state, case.x, case.dt, case.A, case.B, case.C, case.D, None, case.dt_bias, cu,
            _ints([slots - 1], gpu), _ints([[slots - 2, slots - 3]], gpu),
        )  # fmt: skip
        answers.append((y, state[slots - 3 : slots - 1].clone()))
        del state
    assert torch.equal(answers[0][0], answers[1][0])
    assert torch.equal(answers[0][1], answers[1][1])
    assert answers[0][1].any()
    x, weight = torch.randn(2, 10_240, device=gpu).bfloat16(), torch.randn(10_240, 4, device=gpu).bfloat16()
    found = []
    for slots in (45_000, 3):
        state = torch.zeros(slots, 10_240, 5, dtype=torch.bfloat16, device=gpu)
        assert slots == 3 or state.numel() > 2**31
        last = _ints([slots - 1], gpu)
        y = causal_conv1d_update_varlen(x, weight, None, state, cu, last, last, None, silu=True)
        found.append((y, state[slots - 1].clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert torch.equal(found[0][1][:, 3:].t(), x)
