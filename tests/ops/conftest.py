"""The fixture ``backend``: every backend that can run here, one test each.

CPU backends run in the ordinary suite. Triton runs in its interpreter when ``TRITON_INTERPRET=1`` is set
before pytest starts (``-k interpreted`` picks those tests), and for real with ``-m gpu``.
"""

from __future__ import annotations

import pytest
import torch
from backends import Backend, usable_backends


@pytest.fixture(params=usable_backends())
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture(params=(torch.float32, torch.bfloat16, torch.float16), ids=("fp32", "bf16", "fp16"))
def act_dtype(request: pytest.FixtureRequest, backend: Backend) -> torch.dtype:
    """Activation dtype, where the backend takes it."""
    dtype: torch.dtype = request.param
    if dtype not in backend.dtypes:
        pytest.skip(f"{backend.name} computes in float32")
    return dtype
