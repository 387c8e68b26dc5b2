"""Tiny real checkpoints with transformers' answers."""

from __future__ import annotations

import pytest
from engine_models import FAMILIES, RealModel, write


@pytest.fixture(scope="session", params=FAMILIES)
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    """A checkpoint of each family."""
    return write(request.param, tmp_path_factory.mktemp(request.param) / "model")


@pytest.fixture(scope="session")
def mamba2(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    """A Mamba-2 checkpoint."""
    return write("mamba2", tmp_path_factory.mktemp("mamba2") / "model")
