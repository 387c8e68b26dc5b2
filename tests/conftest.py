"""Shared hygiene: every test gets poisoned uninitialised memory and fixed seeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def _poisoning(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = function(*args, **kwargs)
        if out.device.type != "meta":
            if out.is_floating_point():
                out.fill_(float("nan"))
            elif out.dtype in (torch.int32, torch.int64):
                out.fill_(torch.iinfo(out.dtype).min // 2)
        return out

    return poisoned


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uninitialised memory holds NaN (or absurd integers), so that reading it shows."""
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, _poisoning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoning(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def _quiet_log() -> Iterator[None]:
    """Commands set the log up for a process of their own; the next test finds it as it was."""
    log = logging.getLogger("recurra")
    before = (log.propagate, log.level, list(log.handlers))
    yield
    log.propagate, log.handlers[:] = before[0], before[2]
    log.setLevel(before[1])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
