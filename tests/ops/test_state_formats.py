"""Operators on states of every format: against float64, with as much error as the format alone has."""

from __future__ import annotations

import pytest
import torch
from attention_inputs import AnyCase, DeltaCase, LightningCase, run_packed, run_step
from backends import Backend
from inputs import EXACT, Precision, ScanCase, SSDCase, check, run_scan, run_update

from recurra.ops.delta import reference as delta_reference
from recurra.ops.linear_attention import reference as lightning_reference
from recurra.ops.ssm import reference

CPU = torch.device("cpu")
FORMATS = [
    Precision(torch.float32, dtype, by_chance=by_chance)
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
    for by_chance in (False, True)
]
ALL_FORMATS = pytest.mark.parametrize("precision", FORMATS, ids=str)
LENGTHS, STATES = (1, 0, 17, 30), (True, True, False, True)


def _judge(
    got: tuple[torch.Tensor, ...], plain: tuple[torch.Tensor, ...], exact: tuple[torch.Tensor, ...]
) -> None:
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@ALL_FORMATS
@pytest.mark.parametrize("shape", [(3, 80, 3, 96), (2, 20, 1, 48)], ids=str)
def test_mamba2_update(backend: Backend, precision: Precision, shape: tuple[int, int, int, int]) -> None:
    case = SSDCase.draw(3, 3, *shape)
    got = run_update(backend.op("selective_state_update"), case, precision, backend.device, padding=2)
    plain = run_update(reference.selective_state_update, case, precision, CPU)
    exact = run_update(reference.selective_state_update, case.rounded(precision), EXACT, CPU)
    _judge(got, plain, exact)


@ALL_FORMATS
@pytest.mark.parametrize("shape", [(300, 16), (37, 12)], ids=str)
def test_mamba1_update(backend: Backend, precision: Precision, shape: tuple[int, int]) -> None:
    case = ScanCase.draw(3, 3, *shape)
    got = run_update(backend.op("selective_state_update"), case, precision, backend.device, padding=2)
    plain = run_update(reference.selective_state_update, case, precision, CPU)
    exact = run_update(reference.selective_state_update, case.rounded(precision), EXACT, CPU)
    _judge(got, plain, exact)


@ALL_FORMATS
@pytest.mark.parametrize("family", [1, 2])
def test_prefill_loads_and_stores(backend: Backend, precision: Precision, family: int) -> None:
    if family == 1:
        case: ScanCase | SSDCase = ScanCase.draw(sum(LENGTHS), len(LENGTHS), 40, 16)
        name, definition = "selective_scan_varlen", reference.selective_scan_varlen
    else:
        case = SSDCase.draw(sum(LENGTHS), len(LENGTHS), 2, 20, 1, 24)
        name, definition = "mamba_chunk_scan_varlen", reference.mamba_chunk_scan_varlen
    got = run_scan(backend.op(name), case, precision, LENGTHS, STATES, backend.device)
    plain = run_scan(definition, case, precision, LENGTHS, STATES, CPU)
    exact = run_scan(definition, case.rounded(precision), EXACT, LENGTHS, STATES, CPU)
    kept = torch.tensor([n > 0 for n in LENGTHS])
    _judge((got[0], got[1].cpu()[kept]), (plain[0], plain[1][kept]), (exact[0], exact[1][kept]))


def _attention(kind: str, tokens: int, rows: int) -> tuple[AnyCase, str, object]:
    if kind == "delta":
        return DeltaCase.draw(tokens, rows, 2, 4, 20, 24), "gated_delta_rule", delta_reference
    return LightningCase.draw(tokens, rows, 3, 20, 24), "lightning_attention", lightning_reference


@ALL_FORMATS
@pytest.mark.parametrize("kind", ["delta", "lightning"])
def test_attention_update(backend: Backend, precision: Precision, kind: str) -> None:
    case, name, definition = _attention(kind, 3, 3)
    plain_op = getattr(definition, f"{name}_update")
    got = run_step(backend.op(f"{name}_update"), case, precision, backend.device, padding=2)
    plain = run_step(plain_op, case, precision, CPU)
    exact = run_step(plain_op, case.rounded(precision), EXACT, CPU)
    _judge(got, plain, exact)


@ALL_FORMATS
@pytest.mark.parametrize("kind", ["delta", "lightning"])
def test_attention_prefill(backend: Backend, precision: Precision, kind: str) -> None:
    case, name, definition = _attention(kind, 48, 3)
    lengths, states = (1, 17, 30), (True, False, True)
    plain_op = getattr(definition, f"{name}_varlen")
    got = run_packed(backend.op(f"{name}_varlen"), case, precision, lengths, states, backend.device)
    plain = run_packed(plain_op, case, precision, lengths, states, CPU)
    exact = run_packed(plain_op, case.rounded(precision), EXACT, lengths, states, CPU)
    _judge(got, plain, exact)
