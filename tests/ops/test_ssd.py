"""Mamba-2's chunked scan: every backend against its float64 definition, and that against the matrix form."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from backends import Backend
from inputs import EXACT, Precision, SSDCase, check, run_scan, run_update, tokens_of
from plain import ssd_matrix_form
from torch import Tensor

from recurra.ops.ssm import reference

CPU = torch.device("cpu")
FP32 = Precision(torch.float32, torch.float32)
REFERENCE = reference.mamba_chunk_scan_varlen
LENGTHS = (1, 0, 15, 16, 17, 40, 3)
STATES = (True, True, False, True, True, False, False)


def _exact(case: SSDCase, precision: Precision, lengths: tuple[int, ...], states: tuple[bool, ...]):  # type: ignore[no-untyped-def]
    return run_scan(REFERENCE, case.rounded(precision), EXACT, lengths, states, CPU)


def _plain(
    case: SSDCase, precision: Precision, lengths: tuple[int, ...], states: tuple[bool, ...]
) -> tuple[Tensor, Tensor]:
    """Plain PyTorch: the loop in float32, the matrix form with products in 16 bits."""
    if precision.act == torch.float32:
        return run_scan(REFERENCE, case, precision, lengths, states, CPU)
    return ssd_matrix_form(case.to(precision), lengths, states)


def _judge(
    backend: Backend,
    case: SSDCase,
    precision: Precision,
    lengths: tuple[int, ...] = LENGTHS,
    states: tuple[bool, ...] = STATES,
    chunk: int = 16,
) -> None:
    op = backend.op("mamba_chunk_scan_varlen")
    got = run_scan(op, case, precision, lengths, states, backend.device, chunk=chunk)
    plain = _plain(case, precision, lengths, states)
    exact = _exact(case, precision, lengths, states)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


def _draw(heads: int = 4, dim: int = 16, groups: int = 2, state_size: int = 24, **options: bool) -> SSDCase:
    return SSDCase.draw(sum(LENGTHS), len(LENGTHS), heads, dim, groups, state_size, **options)


def test_definition_is_the_matrix_form() -> None:
    for case in (_draw(), _draw(wide_skip=True), replace(_draw(), dt_limit=(0.05, 0.3))):
        y, state = run_scan(REFERENCE, case, EXACT, LENGTHS, STATES, CPU)
        expected_y, expected_state = ssd_matrix_form(case, LENGTHS, STATES)
        torch.testing.assert_close(y, expected_y, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(state, expected_state, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(
    ("heads", "dim", "groups", "state_size"),
    [(4, 48, 2, 80), (3, 80, 3, 96), (2, 112, 1, 48), (2, 64, 1, 128), (2, 5, 1, 3)],
)
def test_shapes(backend: Backend, heads: int, dim: int, groups: int, state_size: int) -> None:
    lengths, states = (1, 17, 30), (True, False, True)
    _judge(backend, SSDCase.draw(48, 3, heads, dim, groups, state_size), FP32, lengths, states)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(backend: Backend, act_dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    if backend.interpreted and act_dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies the bit patterns of bfloat16 as integers")
    _judge(backend, _draw(), Precision(act_dtype, state_dtype))


@pytest.mark.parametrize("chunk", [16, 20, 64, 100, 1])
def test_any_chunk_size(backend: Backend, chunk: int) -> None:
    """Lengths below, at and above the chunk, with states carried into the middle of nothing."""
    lengths, states = (70, 33, 130), (True, False, True)
    if chunk == 1:
        lengths = (5, 1, 3)
    case = SSDCase.draw(sum(lengths), 3, 2, 16, 1, 16)
    _judge(backend, case, FP32, lengths, states, chunk=chunk)


@pytest.mark.parametrize("absent", ["D", "dt_bias"])
def test_each_optional_part_absent(backend: Backend, absent: str) -> None:
    _judge(backend, replace(_draw(), **{absent: None}), FP32)


def test_a_skip_weight_for_each_channel(backend: Backend) -> None:
    _judge(backend, _draw(wide_skip=True), FP32)


def test_dt_limit(backend: Backend) -> None:
    _judge(backend, replace(_draw(), dt_limit=(0.05, 0.3)), FP32)


def test_strong_decay_in_a_long_chunk(backend: Backend) -> None:
    """Sums of dt * A reach -1000 here; their differences must still be right to float32's last digits."""
    case = SSDCase.draw(300, 2, 2, 16, 1, 16, strong=True)
    case = replace(case, dt=case.dt + 3.0)
    _judge(backend, case, FP32, (200, 100), (True, False), chunk=128)


@pytest.mark.parametrize("cuts", [(1,), (20,), (7, 16, 30)], ids=str)
def test_split_anywhere_equals_whole(backend: Backend, cuts: tuple[int, ...]) -> None:
    """The carried state's decay counts from the call's first token, wherever the cut fell."""
    op = backend.op("mamba_chunk_scan_varlen")
    case = SSDCase.draw(37, 1, 4, 16, 2, 24)
    parts, state = [], case.to(FP32, backend.device).state
    for begin, end in pairwise((0, *cuts, 37)):
        part = replace(tokens_of(case, slice(begin, end)), state=state)
        y, state = run_scan(op, part, FP32, (end - begin,), (True,), backend.device)
        parts.append(y)
    plain, exact = _plain(case, FP32, (37,), (True,)), _exact(case, FP32, (37,), (True,))
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


def test_packed_and_each_cut_equals_one_shot_alone(backend: Backend) -> None:
    """Packed 37, 150, 5, each cut at 20, 70, 2 and run as two calls, states carried."""
    op = backend.op("mamba_chunk_scan_varlen")
    lengths, cuts = (37, 150, 5), (20, 70, 2)
    heads, dim, size = (2, 16, 16) if backend.interpreted else (8, 16, 32)
    case = SSDCase.draw(sum(lengths), 3, heads, dim, 1, size)
    starts = [0, 37, 187]
    first = torch.cat([torch.arange(b, b + c) for b, c in zip(starts, cuts, strict=True)])
    second = torch.cat([torch.arange(b + c, b + n) for b, c, n in zip(starts, cuts, lengths, strict=True)])
    rest = tuple(n - c for n, c in zip(lengths, cuts, strict=True))
    new, old = (False,) * 3, (True,) * 3
    y1, state = run_scan(op, tokens_of(case, first), FP32, cuts, new, backend.device, chunk=64)
    part = replace(tokens_of(case, second), state=state)
    y2, state = run_scan(op, part, FP32, rest, old, backend.device, chunk=64)
    joined = torch.empty_like(case.x, dtype=torch.float32)
    joined[first], joined[second] = y1.cpu(), y2.cpu()
    plain, exact = _plain(case, FP32, lengths, new), _exact(case, FP32, lengths, new)
    check(joined, plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


def test_token_by_token_equals_whole(backend: Backend) -> None:
    op = backend.op("selective_state_update")
    case = replace(SSDCase.draw(9, 1, 4, 16, 2, 24), z=None)
    parts, state = [], case.to(FP32, backend.device).state
    for t in range(9):
        part = replace(tokens_of(case, slice(t, t + 1)), state=state)
        y, state = run_update(op, part, FP32, backend.device)
        parts.append(y)
    plain, exact = _plain(case, FP32, (9,), (True,)), _exact(case, FP32, (9,), (True,))
    check(torch.cat(parts), plain[0], exact[0], "outputs")
    check(state, plain[1], exact[1], "states")


def test_packed_equals_alone(backend: Backend) -> None:
    """Bit for bit, so that identical prompts in one batch have one answer."""
    op = backend.op("mamba_chunk_scan_varlen")
    case = SSDCase.draw(45, 3, 4, 16, 2, 24)
    packed, states = run_scan(op, case, FP32, (5, 3, 37), (True, False, True), backend.device)
    for s, (begin, end) in enumerate(((0, 5), (5, 8), (8, 45))):
        alone = replace(tokens_of(case, slice(begin, end)), state=case.state[s : s + 1])
        y, state = run_scan(op, alone, FP32, (end - begin,), (s != 1,), backend.device)
        assert torch.equal(y, packed[begin:end])
        assert torch.equal(state[0], states[s])
