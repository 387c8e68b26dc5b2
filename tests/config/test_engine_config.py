"""Settings: every mistake is found before weights load, and its error says what would work."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from recurra.config.engine import EngineConfig
from recurra.config.mamba import MambaBackendEnum
from recurra.config.scheduler import DEFAULT_MAX_MODEL_LEN
from recurra.config.settle import ModelFacts, resolve, settle_slots
from recurra.device import Device, detect
from recurra.errors import ConfigError

CPU = detect("cpu", 1)
OLD_GPU = Device("cuda", 0, "Tesla T4", (7, 5), 1, True, False, True)
NEW_GPU = Device("cuda", 0, "NVIDIA H200", (9, 0), 1, True, False, True)
FACTS = ModelFacts(torch.float32)


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="m", **settings)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seq=4: unknown setting\. Did you mean 'max_num_seqs'"):
        config(max_num_seq=4)
    with pytest.raises(ConfigError, match=r"Known: .*max_num_seqs"):
        config(zzz=1)
    with pytest.raises(ConfigError, match="model"):
        EngineConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_seqs", 0), ("max_num_seqs", "many"), ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.5), ("load_format", "gguf"), ("num_state_slots", -1), ("num_threads", 0),
        ("max_model_len", 0), ("max_queue_len", -1), ("max_num_batched_tokens", 0), ("tensor_parallel_size", 0),
    ],
)  # fmt: skip
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert (caught.value.setting, caught.value.value) == (name, value)


def test_settings_are_frozen_and_paths_become_text() -> None:
    made = EngineConfig(model=Path("a/b"), dtype=torch.bfloat16, mamba_config={"backend": "Cpu"})
    assert (made.model, made.dtype) == ("a/b", "bfloat16")
    assert made.mamba_config is not None
    assert made.mamba_config.backend is MambaBackendEnum.CPU
    with pytest.raises(ValueError, match="frozen"):
        made.model = "other"
    with pytest.raises(ConfigError, match="Valid: triton"):
        config(mamba_config={"backend": "cuda"})


@pytest.mark.parametrize(
    ("settings", "works"),
    [
        ({"enable_prefix_caching": False, "prefix_cache_dir": "x"}, "enable_prefix_caching=True"),
        ({"speculative_config": {"method": "ngram"}}, "None"),
        ({"quantization": "int8"}, "None"),
        ({"tensor_parallel_size": 2}, "1"),
        ({"mamba_ssm_cache_dtype": "fp4"}, "int8"),
        ({"mamba_cache_dtype": "bfloat16"}, "float32"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"mamba_config": {"enable_stochastic_rounding": True}}, "mamba_ssm_cache_dtype"),
        ({"mamba_config": {"stochastic_rounding_philox_rounds": 5}}, "enable_stochastic_rounding=True"),
    ],
)
def test_what_is_not_offered_is_refused_with_what_works(settings: dict[str, Any], works: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(config(**settings), FACTS, CPU)
    assert works in caught.value.hint
    assert caught.value.setting in str(settings)


@pytest.mark.parametrize(
    ("asked", "settled"),
    [
        ("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16),
        ("float16", torch.float16), ("half", torch.float16), ("fp8", torch.float8_e4m3fn),
        ("fp8_e4m3", torch.float8_e4m3fn), ("int8", torch.int8), (torch.int8, torch.int8),
    ],
)  # fmt: skip
def test_state_precision(asked: Any, settled: torch.dtype) -> None:
    for device in (CPU, NEW_GPU):
        assert resolve(config(mamba_ssm_cache_dtype=asked), FACTS, device).ssm_dtype is settled


def test_auto_states_follow_the_checkpoint() -> None:
    facts = ModelFacts(torch.bfloat16, None, torch.float16)
    assert resolve(config(), facts, CPU).ssm_dtype is torch.float16
    assert resolve(config(mamba_ssm_cache_dtype="float32"), facts, CPU).ssm_dtype is torch.float32


def test_stochastic_rounding_of_narrow_states() -> None:
    asked = {"enable_stochastic_rounding": True, "stochastic_rounding_philox_rounds": 5}
    settled = resolve(config(mamba_ssm_cache_dtype="int8", mamba_config=asked), FACTS, CPU)
    assert (settled.stochastic_rounding, settled.philox_rounds) == (True, 5)
    assert not resolve(config(mamba_ssm_cache_dtype="int8"), FACTS, CPU).stochastic_rounding


def test_dtypes_follow_checkpoint_device_and_backend() -> None:
    def dtypes(device: Device, facts: ModelFacts = FACTS, **settings: Any) -> tuple[torch.dtype, torch.dtype]:
        settled = resolve(config(**settings), facts, device)
        assert settled.ssm_dtype is torch.float32
        assert settled.conv_dtype is settled.act_dtype
        return settled.weight_dtype, settled.act_dtype

    half = ModelFacts(torch.bfloat16)
    assert dtypes(CPU) == (torch.float32, torch.float32)
    assert dtypes(CPU, half) == (torch.bfloat16, torch.float32)
    assert dtypes(CPU, half, dtype="half") == (torch.float16, torch.float32)
    assert dtypes(NEW_GPU, half) == (torch.bfloat16, torch.bfloat16)
    assert dtypes(NEW_GPU, half, mamba_config={"backend": "reference"}) == (torch.bfloat16, torch.float32)
    assert dtypes(OLD_GPU, half) == (torch.float16, torch.float16)
    with pytest.raises(ConfigError, match='Use dtype="float16"'):
        dtypes(OLD_GPU, dtype="bfloat16")
    assert dtypes(CPU, ModelFacts(None))[0] is torch.float32


def test_max_model_len_is_generous_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="recurra"):
        assert resolve(config(), FACTS, CPU).max_model_len == DEFAULT_MAX_MODEL_LEN
    assert f"max_model_len is {DEFAULT_MAX_MODEL_LEN}" in caplog.text
    assert resolve(config(max_model_len=7), FACTS, CPU).max_model_len == 7
    limited = ModelFacts(torch.float32, max_length=100)
    assert resolve(config(), limited, CPU).max_model_len == 100
    with pytest.raises(ConfigError, match="Use at most 100"):
        resolve(config(max_model_len=101), limited, CPU)


@pytest.mark.parametrize("slots", [30, 161, 969])
def test_fewer_slots_than_sequences_are_clamped_not_fatal(
    slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    limits, found = settle_slots(config(max_num_seqs=1024, num_state_slots=slots), CPU, 10, 1 << 30)
    assert (limits.max_num_seqs, found) == (slots, slots)
    assert "max_num_seqs=1024" in caplog.text


def test_slots_follow_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    limits, slots = settle_slots(config(), NEW_GPU, 1 << 20, 100 << 20)
    assert (limits.max_num_seqs, slots) == (99, 99), "one row is the scratch slot"
    assert not caplog.text, "nobody asked for more"
    limits, slots = settle_slots(config(), NEW_GPU, 1 << 20, 1 << 40)
    assert (limits.max_num_seqs, slots, limits.max_num_batched_tokens) == (256, 256, 8192)
    limits, slots = settle_slots(config(max_num_seqs=2000), CPU, 1, 1 << 40)
    assert (slots, limits.max_num_batched_tokens) == (2000, 2000)
    with pytest.raises(ConfigError, match="Use at most 99"):
        settle_slots(config(num_state_slots=100), NEW_GPU, 1 << 20, 100 << 20)
    for free in (1 << 20, 0, -5):
        with pytest.raises(ConfigError, match="no state fits"):
            settle_slots(config(), CPU, 1 << 20, free)
