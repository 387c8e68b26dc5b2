"""Mamba-1's scan: every backend against its float64 definition, and that against a closed form."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from backends import Backend
from inputs import EXACT, Precision, ScanCase, check, run_scan, run_update, tokens_of
from plain import scan_sum_form

from recurra.ops.ssm import reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
PLAIN = reference.selective_scan_varlen
LENGTHS = (1, 0, 3, 4, 33, 2, 16)
STATES = (True, True, False, True, False, False, True)


def _draw(channels: int, state_size: int, optional: bool = True) -> ScanCase:
    return ScanCase.draw(sum(LENGTHS), len(LENGTHS), channels, state_size, optional)


def _judge(backend: Backend, case: ScanCase, precision: Precision) -> None:
    op = backend.op("selective_scan_varlen")
    got = run_scan(op, case, precision, LENGTHS, STATES, backend.device)
    plain = run_scan(PLAIN, case, precision, LENGTHS, STATES, CPU)
    exact = run_scan(PLAIN, case.rounded(precision), EXACT, LENGTHS, STATES, CPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


def test_definition_is_the_double_sum() -> None:
    case = _draw(7, 5)
    y, state = run_scan(PLAIN, case, EXACT, LENGTHS, STATES, CPU)
    expected_y, expected_state = scan_sum_form(case, LENGTHS, STATES)
    torch.testing.assert_close(y, expected_y, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(state, expected_state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("channels", "state_size"), [(40, 16), (33, 12), (5, 3)])
def test_shapes(backend: Backend, channels: int, state_size: int) -> None:
    _judge(backend, _draw(channels, state_size), FP32)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    _judge(backend, _draw(20, 16), Precision(act_dtype, state_dtype))


@pytest.mark.parametrize("absent", ["D", "z", "dt_bias"])
def test_each_optional_part_absent(backend: Backend, absent: str) -> None:
    _judge(backend, replace(_draw(20, 16), **{absent: None}), FP32)


def test_all_optional_parts_absent(backend: Backend) -> None:
    _judge(backend, _draw(20, 16, optional=False), FP32)


@pytest.mark.parametrize("cuts", [(1,), (4, 9), (15, 16)], ids=str)
def test_split_anywhere_equals_whole(backend: Backend, cuts: tuple[int, ...]) -> None:
    op = backend.op("selective_scan_varlen")
    case = ScanCase.draw(17, 1, 20, 16)
    parts, state = [], case.to(FP32, backend.device).state
    for begin, end in pairwise((0, *cuts, 17)):
        part = replace(tokens_of(case, slice(begin, end)), state=state)
        y, state = run_scan(op, part, FP32, (end - begin,), (True,), backend.device)
        parts.append(y)
    plain = run_scan(PLAIN, case, FP32, (17,), (True,), CPU)
    exact = run_scan(PLAIN, case.rounded(FP32), EXACT, (17,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "split outputs")
    check(state, plain[1], exact[1], "split states")


def test_token_by_token_equals_whole(backend: Backend) -> None:
    op = backend.op("selective_state_update")
    case = ScanCase.draw(9, 1, 20, 16)
    parts, state = [], case.to(FP32, backend.device).state
    for t in range(9):
        part = replace(tokens_of(case, slice(t, t + 1)), state=state)
        y, state = run_update(op, part, FP32, backend.device)
        parts.append(y)
    plain = run_scan(PLAIN, case, FP32, (9,), (True,), CPU)
    exact = run_scan(PLAIN, case.rounded(FP32), EXACT, (9,), (True,), CPU)
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


def test_packed_equals_alone(backend: Backend) -> None:
    op = backend.op("selective_scan_varlen")
    case = ScanCase.draw(25, 3, 20, 16)
    packed, states = run_scan(op, case, FP32, (5, 3, 17), (True, False, True), backend.device)
    for s, (begin, end) in enumerate(((0, 5), (5, 8), (8, 25))):
        alone = replace(tokens_of(case, slice(begin, end)), state=case.state[s : s + 1])
        y, state = run_scan(op, alone, FP32, (end - begin,), (s != 1,), backend.device)
        assert torch.equal(y, packed[begin:end])
        assert torch.equal(state[0], states[s])
