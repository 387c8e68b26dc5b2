"""Formats of states and how they are rounded: the definition, and that every backend has its bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from backends import Backend
from torch import Tensor

from recurra.ops.rounding import NEAREST, SCALE_DTYPE, SCALED, Rounding, reference, stochastic

NARROW = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
FORMATS = pytest.mark.parametrize("dtype", NARROW, ids=lambda d: str(d)[6:])


def _at(step: int, seed: int = 12345678901234, slot_layer: int = 3, rounds: int = 0) -> Rounding:
    rounding = stochastic(seed, philox_rounds=rounds).of_layer(slot_layer)
    rounding.step.fill_(step)
    return rounding


def _words(*counter: int, seed: int, rounds: int) -> list[int]:
    words = reference.philox(tuple(torch.tensor([c]) for c in counter), torch.tensor([seed]), rounds)
    return [int(word) for word in words]


def test_philox_known_answers() -> None:
    """The vectors that come with the generator's authors' own implementation."""
    assert _words(0, 0, 0, 0, seed=0, rounds=10) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert _words(ones, ones, ones, ones, seed=-1, rounds=10) == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]
    assert _words(0, 0, 0, 0, seed=0, rounds=7) == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_every_part_of_the_counter_changes_the_draws() -> None:
    shape, slots = (2, 9, 5), torch.tensor([4])
    base = reference.draws(_at(7), slots, shape)
    assert torch.equal(base, reference.draws(_at(7), slots, shape))
    others = [
        reference.draws(_at(8), slots, shape),
        reference.draws(_at(7 + 2**32), slots, shape),
        reference.draws(_at(7, seed=12345678901235), slots, shape),
        reference.draws(_at(7, seed=12345678901234 + 2**32), slots, shape),
        reference.draws(_at(7, slot_layer=4), slots, shape),
        reference.draws(_at(7), torch.tensor([5]), shape),
        reference.draws(_at(7, rounds=6), slots, shape),
        base.flip(1),  # another head
    ]
    for other in others:
        assert (other == base).sum() < 4  # of 90, by chance 0.001
    assert torch.equal(reference.draws(_at(7, rounds=7), slots, shape), base), "7 is the default"


def test_draws_are_even() -> None:
    bits = reference.draws(_at(0), torch.arange(1, 9), (4, 16, 64)).flatten()
    counts = torch.bincount(bits >> 8, minlength=256).double()
    assert bits.max() < 2**16
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    assert 160 < chi2 < 370, chi2  # 255 degrees of freedom, within five sigmas


def _stored(value: Tensor, dtype: torch.dtype, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """A value (S, ..., R, N) stored in slots 1, 2 ... of a state, and its scales."""
    state = torch.zeros(value.shape[0] + 1, *value.shape[1:]).to(dtype)
    scale = torch.zeros(state.shape[:-1], dtype=SCALE_DTYPE)
    slots = torch.arange(1, value.shape[0] + 1, dtype=torch.int32)
    reference.store(state, scale, slots, value, rounding)
    return state, scale


def _read(state: Tensor, scale: Tensor) -> Tensor:
    slots = torch.arange(1, state.shape[0])
    return reference.load(state, scale if state.dtype in SCALED else None, slots, torch.float32)


def _unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """One unit in the last place of each element, as its format has it at that size."""
    if dtype == torch.int8:
        return value.abs().amax(-1, keepdim=True) / 127 * 1.01 + torch.zeros_like(value)
    digits, low = {torch.bfloat16: (7, -126), torch.float16: (10, -14), torch.float8_e4m3fn: (3, -6)}[dtype]
    shift = torch.zeros(())
    if dtype in SCALED:
        shift = torch.floor(torch.log2(value.abs().amax(-1, keepdim=True))) - 7  # the scale, or twice it
    exponent = torch.floor(torch.log2(value.abs().clamp(min=1e-38)))
    return torch.exp2(torch.maximum(exponent, low + shift) - digits)


@FORMATS
@pytest.mark.parametrize("by_chance", [False, True], ids=("nearest", "stochastic"))
def test_error_is_what_the_format_allows(dtype: torch.dtype, by_chance: bool) -> None:
    value = torch.randn(3, 5, 48) * torch.exp(torch.randn(3, 5, 1) * 3)
    got = _read(*_stored(value, dtype, _at(1) if by_chance else NEAREST))
    units = (got - value).abs() / _unit(value, dtype)
    assert units.max() <= (1.0 if by_chance else 0.5) * 1.001
    assert units.max() > 0.4


@FORMATS
def test_the_mean_of_many_roundings_is_the_value(dtype: torch.dtype) -> None:
    """And nearest rounding's isn't: the same value is off by the same part of a unit every time."""
    value = torch.randn(1, 2, 16)
    value[0, :, 0] = 4.0  # pins the scale
    rounding, total, rounds = _at(0), torch.zeros(2, 16, dtype=torch.float64), 1000
    for _ in range(rounds):
        total += _read(*_stored(value, dtype, rounding))[0]
        rounding.advance()
    bias = (total / rounds - value[0]).abs() / _unit(value, dtype)[0]
    assert bias.max() < 5 * 0.5 / rounds**0.5
    nearest = (_read(*_stored(value, dtype, NEAREST))[0] - value[0]).abs() / _unit(value, dtype)[0]
    assert nearest.max() > bias.max()


@FORMATS
def test_tiny_increments_accumulate_where_nearest_stalls(dtype: torch.dtype) -> None:
    """A thousand steps of a sixteenth of a unit."""
    start = torch.full((1, 8, 32), 1.0)
    start[..., 0] = 2.0  # pins the scale
    step = float(_unit(start, dtype)[0, 0, 1]) / 16
    states = {}
    for name, rounding in (("nearest", NEAREST), ("stochastic", _at(0))):
        state, scale = _stored(start, dtype, NEAREST)
        begin = _read(state, scale)[..., 1:].mean()
        for _ in range(160):
            value = _read(state, scale)
            value[..., 1:] += step
            value[..., 0] = 2.0
            reference.store(state, scale, torch.tensor([1]), value, rounding)
            rounding.advance()
        states[name] = (_read(state, scale)[..., 1:].mean() - begin).item() / (160 * step)
    assert states["nearest"] == 0.0
    assert 0.9 < states["stochastic"] < 1.1, states


@FORMATS
@pytest.mark.parametrize("by_chance", [False, True], ids=("nearest", "stochastic"))
def test_values_at_the_edges(dtype: torch.dtype, by_chance: bool) -> None:
    rounding = _at(5) if by_chance else NEAREST
    zeros = _read(*_stored(torch.zeros(1, 3, 5), dtype, rounding))
    assert torch.equal(zeros, torch.zeros(1, 3, 5))
    if dtype != torch.int8:
        negative = _read(*_stored(torch.full((1, 3, 5), -0.0), dtype, rounding))
        assert negative.signbit().all(), "-0 keeps its sign"
    exact = torch.tensor([1.0, -0.5, 0.25, -1.75, 1.5]).expand(1, 3, 5).clone()
    if dtype != torch.int8:
        assert torch.equal(_read(*_stored(exact, dtype, rounding)), exact), "what fits isn't moved"
    poison = torch.ones(1, 3, 5)
    poison[0, 0, 2], poison[0, 1, 2] = float("nan"), float("inf")
    got = _read(*_stored(poison, dtype, rounding))
    assert got[0, 0, 2].isnan()
    assert not got[0, 1, 2].isfinite()
    assert torch.equal(got[0, 2], poison[0, 2]) or dtype == torch.int8
    huge = torch.tensor([3.0e38, -3.0e38, 1e38, 1.0, 1e-45]).expand(1, 3, 5).clone()
    wide = _read(*_stored(huge, dtype, rounding))
    assert not wide.isnan().any(), "a finite number never becomes a NaN"
    if dtype in SCALED:
        assert wide.isfinite().all(), "with a scale nothing overflows"
    tiny = torch.full((1, 3, 5), 1e-42)
    assert _read(*_stored(tiny, dtype, rounding)).abs().max() <= 2e-7


def test_an_int8_row_of_127_scales_keeps_its_scale() -> None:
    """Rounded up by a rounding error instead, it would move at every step though nothing came in."""
    scales = (torch.rand(1, 64) + 1).bfloat16()
    value = torch.randint(-127, 128, (1, 64, 32)).float() * scales.float()[..., None]
    value[..., 0] = 127 * scales.float()
    state, scale = _stored(value, torch.int8, NEAREST)
    assert torch.equal(scale[1:], scales)
    assert torch.equal(_read(state, scale), value)


def test_float16_subnormals_are_rounded_by_chance_too() -> None:
    """2^-24 is the smallest; a quarter of it must come out as 2^-24 a quarter of the time."""
    value = torch.full((1, 64, 64), -(2.0**-26))
    got = _read(*_stored(value, torch.float16, _at(3)))
    assert set(got.unique().tolist()) == {-(2.0**-24), 0.0}
    assert abs((got != 0).double().mean() - 0.25) < 0.03


@FORMATS
def test_only_the_given_slots_are_written(dtype: torch.dtype) -> None:
    state = torch.zeros(5, 9, 6).to(dtype)
    state.view(torch.uint8).fill_(0x2A)
    scale = torch.full((5, 9), 7.0, dtype=SCALE_DTYPE)
    before, scales = state.view(torch.uint8).clone(), scale.clone()
    reference.store(state, scale, torch.tensor([3, 1]), torch.randn(2, 9, 6), _at(0))
    assert torch.equal(state.view(torch.uint8)[[0, 2, 4]], before[[0, 2, 4]])
    assert torch.equal(scale[[0, 2, 4]], scales[[0, 2, 4]])


def test_layers_share_seed_and_step() -> None:
    rounding = stochastic(1)
    other = rounding.of_layer(2)
    rounding.advance()
    assert other.step.item() == 1
    assert other == replace(rounding, layer=2)
    parts = [reference.draws(other.of_part(part), torch.tensor([1]), (8, 8)) for part in (0, 1)]
    assert not torch.equal(*parts)
    NEAREST.advance()
    assert NEAREST.step.item() == 0


def _through_backend(
    backend: Backend, value: Tensor, dtype: torch.dtype, rounding: Rounding
) -> tuple[Tensor, Tensor, Tensor]:
    """Store a value in slots 4, 2, 1 ... and read it again: bytes, scales, and what was read."""
    device, rows = backend.device, value.shape[0]
    rounding = replace(rounding, seed=rounding.seed.to(device), step=rounding.step.to(device))
    slots = torch.tensor([4, 2, 1], dtype=torch.int32, device=device)[:rows]
    state = torch.zeros(6, *value.shape[1:], device=device).to(dtype)
    scale = torch.zeros(state.shape[:-1], dtype=SCALE_DTYPE, device=device)
    value, bounds = value.to(device), torch.arange(rows + 1, dtype=torch.int32, device=device)
    if backend.name == "reference":
        reference.store(state, scale, slots, value, rounding)
        read = reference.load(state, scale if dtype in SCALED else None, slots, torch.float32)
    elif backend.name == "cpu":
        from recurra.ops.rounding import cpu

        cpu.store_states(state, scale, slots, value, bounds, rounding)
        read = cpu.widen_states(state, scale, slots)
    elif backend.name == "triton":
        from recurra.ops.rounding import triton

        triton.store_states(state, scale, slots, value, bounds, rounding)
        read = triton.widen_states(state, scale, slots, torch.ones(rows, dtype=torch.bool, device=device))
    else:
        pytest.skip(f"{backend.name} stores no states")
    return state.view(torch.uint8).cpu(), scale.cpu(), read.cpu()


@FORMATS
@pytest.mark.parametrize("by_chance", [False, True], ids=("nearest", "stochastic"))
@pytest.mark.parametrize("shape", [(2, 10, 24), (5, 3), (80, 48), (2, 9, 96)], ids=str)
def test_every_backend_has_the_references_bits(
    backend: Backend, dtype: torch.dtype, by_chance: bool, shape: tuple[int, ...]
) -> None:
    value = torch.randn(3, *shape) * torch.exp(torch.randn(3, *shape) * 3)
    edges = [0.0, -0.0, -3e-6, 6e-5, 3e-8, 1e-30, -448.0, 60000.0, 1.0, -0.5]
    if not backend.interpreted or dtype != torch.bfloat16:
        edges += [1e-40, -1e-45]
    value.flatten()[: len(edges)] = torch.tensor(edges)
    if backend.interpreted:
        if dtype == torch.bfloat16 and not by_chance:
            pytest.skip("Triton's interpreter cuts off where it should round to bfloat16")
        if dtype == torch.float16:
            value = value.clamp(-65000, 65000)  # numpy warns of overflow
    rounding = _at(2**33 + 5) if by_chance else NEAREST
    expected = _through_backend(Backend("reference", torch.device("cpu")), value, dtype, rounding)
    got = _through_backend(backend, value, dtype, rounding)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1].view(torch.int16), expected[1].view(torch.int16))
    assert torch.equal(got[2].view(torch.int32), expected[2].view(torch.int32))


@FORMATS
def test_what_is_not_finite_stays_so_in_every_backend(backend: Backend, dtype: torch.dtype) -> None:
    value = torch.ones(1, 16, 20)
    value[0, 3, 7], value[0, 9, 19], value[0, 12, 0] = float("nan"), float("inf"), -float("inf")
    for rounding in (NEAREST, _at(1)):
        with np.errstate(invalid="ignore"):  # Triton's interpreter computes with numpy
            read = _through_backend(backend, value, dtype, rounding)[2]
        assert read[0, 3, 7].isnan()
        assert not read[0, 9, 19].isfinite()
        assert not read[0, 12, 0].isfinite()
        others = [r for r in range(16) if r not in (3, 9, 12)]
        assert read[0, others].isfinite().all()
