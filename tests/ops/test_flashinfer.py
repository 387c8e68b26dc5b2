"""The flashinfer backend against a stand-in: FlashInfer isn't installable here, so its real kernels are untested."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from inputs import Precision, ScanCase, SSDCase
from torch import Tensor

from recurra.device import Device
from recurra.errors import ConfigError
from recurra.ops import build
from recurra.ops.compat.ssm import selective_state_update as by_field
from recurra.ops.registry import BACKENDS, OPERATORS, choose, refusal
from recurra.ops.rounding import stochastic
from recurra.ops.ssm import flashinfer, reference

CPU = Device("cpu", 0, "a cpu", (0, 0), 2, has_triton=False, triton_interpreter=False, has_numba=False)
HOPPER = replace(CPU, type="cuda", name="a gpu", capability=(9, 0), has_flashinfer=True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A package of that name whose update is what its documentation says, on our operators."""
    seen: list[dict[str, Any]] = []

    def selective_state_update(
        state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor | None = None,
        dt_bias: Tensor | None = None, dt_softplus: bool = False, state_batch_indices: Tensor | None = None,
        pad_slot_id: int = -1, out: Tensor | None = None, algorithm: str = "auto", rand_seed: Tensor | None = None,
        philox_rounds: int = 10,
    ) -> Tensor:  # fmt: skip
        assert x.is_contiguous()
        assert (A.stride(-1), A.stride(-2), dt.stride(-1), D.stride(-1)) == (0, 0, 0, 0)
        assert D.dtype == dt.dtype
        seen.append({"algorithm": algorithm, "seed": rand_seed, "rounds": philox_rounds})
        return by_field(
            state,
            x,
            dt,
            A,
            B,
            C,
            D,
            z,
            dt_bias,
            dt_softplus,
            state_batch_indices,
            pad_slot_id=pad_slot_id,
            out=out,
        )

    package, module = ModuleType("flashinfer"), ModuleType("flashinfer.mamba")
    module.selective_state_update = selective_state_update  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.mamba", module)
    return seen


def test_it_is_chosen_when_asked_for_and_the_algorithm_arrives(calls: list[dict[str, Any]]) -> None:
    ops = build(HOPPER, "flashinfer", ssu_algorithm="vertical")
    served = {choice.operator: choice for choice in ops.choices}
    assert served["selective_state_update"].backend == "flashinfer"
    scan = served["mamba_chunk_scan_varlen"]
    assert scan.backend == "reference"
    assert "10.0" in scan.refused["flashinfer"]
    assert "9.0" in scan.refused["flashinfer"]
    case = SSDCase.draw(3, 3, 4, 6, 2, 5).to(Precision(torch.float32, torch.float32))
    slots = torch.tensor([2, 0, 1], dtype=torch.int32)
    state = torch.zeros(3, 4, 6, 5)
    state[[2, 1]] = case.state[[0, 2]]
    other = state.clone()
    arguments = (case.x, case.dt, case.A, case.B, case.C, case.D, case.z, case.dt_bias, slots)
    y = ops.selective_state_update(state, *arguments)
    exact = reference.selective_state_update(other, *arguments)
    torch.testing.assert_close(y[[0, 2]], exact[[0, 2]])
    torch.testing.assert_close(state[1:], other[1:])
    assert calls == [{"algorithm": "vertical", "seed": None, "rounds": 10}]


def test_chance_is_handed_on(calls: list[dict[str, Any]]) -> None:
    case = SSDCase.draw(1, 1, 4, 6, 2, 5).to(Precision(torch.float32, torch.float16))
    state = torch.zeros(2, 4, 6, 5, dtype=torch.float16)
    flashinfer.selective_state_update(
        state, case.x, case.dt, case.A, case.B, case.C, None, None, None, torch.tensor([1], dtype=torch.int32),
        rounding=stochastic(5, philox_rounds=4),
    )  # fmt: skip
    assert calls[0]["seed"].tolist() == [5]
    assert calls[0]["rounds"] == 4


def test_what_it_cannot_do_is_refused_by_name(calls: list[dict[str, Any]]) -> None:
    slots = torch.tensor([1], dtype=torch.int32)
    one = ScanCase.draw(1, 1, 4, 5).to(Precision(torch.float32, torch.float32))
    two = SSDCase.draw(1, 1, 4, 6, 2, 5).to(Precision(torch.float32, torch.float32))
    rest = (two.x, two.dt, two.A, two.B, two.C, None, None, None, slots)
    state = torch.zeros(2, 4, 6, 5)
    with pytest.raises(ConfigError, match="Mamba-1"):
        flashinfer.selective_state_update(
            torch.zeros(2, 4, 5), one.x, one.dt, one.A, one.B, one.C, None, None, None, slots
        )
    with pytest.raises(ConfigError, match="time_step_limit"):
        flashinfer.selective_state_update(state, *rest, dt_limit=(0.0, 0.1))
    with pytest.raises(ConfigError, match="mamba_ssm_cache_dtype"):
        flashinfer.selective_state_update(state.to(torch.int8), *rest)
    with pytest.raises(ConfigError, match="enable_stochastic_rounding"):
        flashinfer.selective_state_update(state.bfloat16(), *rest, rounding=stochastic(1))
    assert not calls


def test_refusals() -> None:
    assert "no cpu kernels" in str(refusal("flashinfer", CPU))
    assert "pip install" in str(refusal("flashinfer", replace(HOPPER, has_flashinfer=False)))
    with pytest.raises(
        ConfigError, match=r"prefill_backend='flashinfer': its fused scan needs compute capability 10\.0"
    ):
        build(HOPPER, prefill_backend="flashinfer")
    with pytest.raises(ConfigError, match="isn't wired up"):
        build(replace(HOPPER, capability=(10, 0)), prefill_backend="flashinfer")


def test_every_operator_explains_every_backend_passed_over() -> None:
    for operator in OPERATORS:
        order = ("flashinfer", *(b for b in BACKENDS if b != "flashinfer"))
        choice, _ = choose(operator, HOPPER, order)
        passed = order if choice.backend == "none" else order[: order.index(choice.backend)]
        assert tuple(choice.refused) == passed
        assert all(choice.refused.values())
