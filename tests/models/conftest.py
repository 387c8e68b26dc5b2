"""Fixtures: every checkpoint with transformers' answers, and every backend."""

from __future__ import annotations

import pytest
from model_cases import CASES, Golden, Machine, machine_of, make_golden


@pytest.fixture(scope="session", params=CASES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A checkpoint of each family and layout, with transformers' answers."""
    return make_golden(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["cpu/reference", "cpu/cpu", pytest.param("cuda/triton", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    """Each backend on its device."""
    device, _, backend = request.param.partition("/")
    return machine_of(device, backend)
