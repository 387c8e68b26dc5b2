"""Devices by name: what exists is described, everything else is refused with what would work."""

from __future__ import annotations

import pytest
import torch

from recurra.device import detect
from recurra.errors import ConfigError


@pytest.mark.parametrize(
    "name",
    ["cpu:1", "cpu:0", "cpu:", "auto:0", "cuda:", "cuda:-1", "cuda:x", "cuda:1.0", "cuda:\u00b2", "CPU", "gpu",
     "", " cpu", "cuda:0:1"],
)  # fmt: skip
def test_no_such_device(name: str) -> None:
    with pytest.raises(ConfigError, match="not a device") as caught:
        detect(name)
    assert (caught.value.setting, caught.value.value) == ("device", name)
    assert '"cpu"' in caught.value.hint


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:99"])
def test_cuda_where_there_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA GPU"):
        detect(name)


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="there are 2 GPUs") as caught:
        detect("cuda:99")
    assert caught.value.value == "cuda:99"


def test_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECURRA_NUM_THREADS", "3")
    assert detect("cpu").num_threads == 3
    assert detect("cpu", 2).num_threads == 2, "the setting wins"
    for wrong in ("two", "-1", "1.5", ""):
        monkeypatch.setenv("RECURRA_NUM_THREADS", wrong)
        with pytest.raises(ConfigError, match="RECURRA_NUM_THREADS"):
            detect("cpu")
