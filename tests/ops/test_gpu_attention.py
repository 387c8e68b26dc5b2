"""Lightning attention, delta rules and the short convolution on a real GPU: real shapes, every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from attention_inputs import (
    DeltaCase,
    LightningCase,
    ShortConvCase,
    delta_matrix_form,
    lightning_matrix_form,
    run_packed,
    run_step,
)
from backends import Backend
from inputs import EXACT, Precision, check

from recurra.ops.delta import reference as delta_reference
from recurra.ops.short_conv import reference as short_conv_reference

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
TRITON = Backend("triton", GPU)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LENGTHS, STATES = (300, 1, 63, 64, 65, 257), (True, False, True, False, True, False)


@pytest.fixture(autouse=True)
def _freed() -> Iterator[None]:
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("act", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [64, 256])
@pytest.mark.parametrize(("key", "value"), [(128, 128), (32, 64), (96, 80), (256, 128)])
def test_lightning_at_real_shapes(act: torch.dtype, chunk: int, key: int, value: int) -> None:
    case = LightningCase.draw(sum(LENGTHS), len(LENGTHS), 8, key, value)
    precision = Precision(act, torch.float32)
    op = TRITON.op("lightning_attention_varlen")
    got = run_packed(op, case, precision, LENGTHS, STATES, GPU, chunk=chunk)
    again = run_packed(op, case, precision, LENGTHS, STATES, GPU, chunk=chunk)
    assert torch.equal(got[0], again[0]), "an answer that changes from run to run is a race"
    plain = lightning_matrix_form(case.to(precision, GPU), LENGTHS, STATES)
    exact = lightning_matrix_form(case.rounded(precision).to(EXACT, GPU), LENGTHS, STATES)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@pytest.mark.parametrize("act", DTYPES, ids=str)
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
@pytest.mark.parametrize("chunk", [64, 256])
@pytest.mark.parametrize(("key", "value"), [(128, 128), (32, 64), (96, 80), (256, 128)])
def test_delta_at_real_shapes(act: torch.dtype, by_channel: bool, chunk: int, key: int, value: int) -> None:
    case = DeltaCase.draw(sum(LENGTHS), len(LENGTHS), 2, 4, key, value, by_channel=by_channel)
    precision = Precision(act, torch.float32)
    op = TRITON.op("gated_delta_rule_varlen")
    got = run_packed(op, case, precision, LENGTHS, STATES, GPU, chunk=chunk)
    again = run_packed(op, case, precision, LENGTHS, STATES, GPU, chunk=chunk)
    assert torch.equal(got[0], again[0]), "an answer that changes from run to run is a race"
    plain = delta_matrix_form(case.to(precision, GPU), LENGTHS, STATES)
    exact = delta_matrix_form(case.rounded(precision).to(EXACT, GPU), LENGTHS, STATES)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "state")


@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_unnormalised_keys_stay_finite(by_channel: bool) -> None:
    """As reported of another engine's triangular step: log decays from -20 to 0, beta near 1, bfloat16."""
    case = DeltaCase.draw(512, 1, 2, 4, 64, 64, by_channel=by_channel, lowest=-20.0)
    case = replace(case, norm=False, beta=1 - case.beta * 1e-3)
    precision = Precision(torch.bfloat16, torch.float32)
    y, state = run_packed(
        TRITON.op("gated_delta_rule_varlen"), case, precision, (512,), (True,), GPU, chunk=64
    )
    assert torch.isfinite(y).all()
    assert torch.isfinite(state).all()
    plain = delta_matrix_form(case.to(precision, GPU), (512,), (True,))
    exact = delta_matrix_form(case.rounded(precision).to(EXACT, GPU), (512,), (True,))
    check(y, plain[0], exact[0], "output")


@pytest.mark.parametrize("act", DTYPES, ids=str)
def test_two_halves_of_512_equal_the_whole(act: torch.dtype) -> None:
    case = DeltaCase.draw(512, 1, 4, 4, 128, 128)
    precision = Precision(act, torch.float32)
    op = TRITON.op("gated_delta_rule_varlen")
    first, state = run_packed(op, case.tokens(slice(0, 256)), precision, (256,), (False,), GPU, chunk=64)
    second, state = run_packed(
        op, case.tokens(slice(256, 512), state=state), precision, (256,), (True,), GPU, chunk=64
    )
    whole, end = run_packed(op, case, precision, (512,), (False,), GPU, chunk=64)
    assert torch.equal(torch.cat([first, second]), whole), "a cut between two chunks changes nothing"
    assert torch.equal(state, end)


@pytest.mark.parametrize("act", DTYPES, ids=str)
@pytest.mark.parametrize("by_channel", [False, True], ids=["head", "channel"])
def test_steps_at_real_shapes(act: torch.dtype, by_channel: bool) -> None:
    case = DeltaCase.draw(64, 64, 8, 16, 128, 128, by_channel=by_channel)
    reference = delta_reference.gated_delta_rule_update
    for state_dtype in (torch.float32, torch.bfloat16):
        precision = Precision(act, state_dtype)
        got = run_step(TRITON.op("gated_delta_rule_update"), case, precision, GPU, padding=3)
        plain = run_step(reference, case, precision, GPU)
        exact = run_step(reference, case.rounded(precision), EXACT, GPU)
        check(got[0], plain[0], exact[0], "output")
        check(got[1], plain[1], exact[1], "state")


@pytest.mark.parametrize("act", DTYPES, ids=str)
def test_short_convolution_at_real_shapes(act: torch.dtype) -> None:
    case = ShortConvCase.draw(sum(LENGTHS), len(LENGTHS), 2048, 3, bias=False)
    precision = Precision(act, act)
    reference = short_conv_reference.short_conv_varlen
    got = run_packed(TRITON.op("short_conv_varlen"), case, precision, LENGTHS, STATES, GPU, chunk=256)
    plain = run_packed(reference, case, precision, LENGTHS, STATES, GPU)
    exact = run_packed(reference, case.rounded(precision), EXACT, LENGTHS, STATES, GPU)
    check(got[0], plain[0], exact[0], "output")
    check(got[1], plain[1], exact[1], "window")
