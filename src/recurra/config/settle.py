"""What becomes of the settings on a device: everything chosen, or refused before weights are read.

>>> settled = resolve(EngineConfig(model="checkpoints/mamba2-130m"), ModelFacts(torch.float32), detect("cpu"))
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from recurra.config.engine import EngineConfig
from recurra.config.mamba import MambaBackendEnum, MambaConfig
from recurra.config.scheduler import DEFAULT_MAX_MODEL_LEN, SchedulerLimits
from recurra.device import Device
from recurra.errors import ConfigError

log = logging.getLogger("recurra")

DTYPES = {
    "float32": torch.float32,
    "float": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "half": torch.float16,
}
_DTYPE_NAMES = '"auto", "float32", "bfloat16" or "float16"'

#: What states may be kept in: those, and 8 bits with a scale for each row.
STATE_DTYPES = {
    **DTYPES,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "int8": torch.int8,
}
_STATE_NAMES = '"auto", "float32", "bfloat16", "float16", "fp8" or "int8"'


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What settings depend on in a checkpoint, known before its weights are read.

    Attributes:
        dtype: the checkpoint's own precision, or None if it doesn't say.
        max_length: a hard limit of the model in tokens; None for pure recurrent models.
        ssm_dtype: precision of SSM states that the checkpoint insists on, or None.
    """

    dtype: torch.dtype | None
    max_length: int | None = None
    ssm_dtype: torch.dtype | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The settings after the device and the checkpoint had their say; nothing is left to choose.

    But for the numbers of sequences and slots: :func:`settle_slots` does that once the size of a state
    and the free memory are known.
    """

    device: Device
    backend: str | None
    prefill_backend: str | None
    ssu_algorithm: str | None
    weight_dtype: torch.dtype
    act_dtype: torch.dtype
    conv_dtype: torch.dtype
    ssm_dtype: torch.dtype
    max_model_len: int
    stochastic_rounding: bool = False
    philox_rounds: int = 0


def resolve(config: EngineConfig, model: ModelFacts, device: Device) -> Settled:
    """Settle everything that needs no weights, or refuse it now.

    Raises:
        ConfigError: a setting that can't work here; it names a value that would.
    """
    _refuse_not_offered(config)
    _check_cache(config)
    mamba = config.mamba_config or MambaConfig()
    weight_dtype = _weight_dtype(config.dtype, model.dtype, device)
    # CPU kernels and the reference widen weights as they read them and compute in float32.
    reference = mamba.backend is MambaBackendEnum.REFERENCE
    act_dtype = torch.float32 if device.type == "cpu" or reference else weight_dtype
    ssm_dtype = _ssm_dtype(config.mamba_ssm_cache_dtype, model.ssm_dtype)
    _check_rounding(mamba, ssm_dtype)
    return Settled(
        device=device,
        backend=mamba.backend.value if mamba.backend else None,
        prefill_backend=mamba.prefill_backend.value if mamba.prefill_backend else None,
        ssu_algorithm=mamba.ssu_algorithm,
        weight_dtype=weight_dtype,
        act_dtype=act_dtype,
        conv_dtype=_conv_dtype(config.mamba_cache_dtype, act_dtype),
        ssm_dtype=ssm_dtype,
        max_model_len=_max_model_len(config.max_model_len, model.max_length),
        stochastic_rounding=mamba.enable_stochastic_rounding,
        philox_rounds=mamba.stochastic_rounding_philox_rounds,
    )


def _check_rounding(mamba: MambaConfig, ssm_dtype: torch.dtype) -> None:
    if mamba.enable_stochastic_rounding and ssm_dtype is torch.float32:
        raise ConfigError(
            "enable_stochastic_rounding", True, "float32 states are not rounded.",
            'Leave it False, or set mamba_ssm_cache_dtype to "float16", "bfloat16", "fp8" or "int8".',
        )  # fmt: skip
    if mamba.stochastic_rounding_philox_rounds and not mamba.enable_stochastic_rounding:
        raise ConfigError(
            "stochastic_rounding_philox_rounds", mamba.stochastic_rounding_philox_rounds,
            "nothing is drawn without stochastic rounding.",
            "Leave it 0, or set enable_stochastic_rounding=True.",
        )  # fmt: skip


def _check_cache(config: EngineConfig) -> None:
    """Refuse settings of a cache that is off."""
    for name in ("prefix_cache_bytes", "prefix_cache_host_bytes", "prefix_cache_dir"):
        value = getattr(config, name)
        if value and not config.enable_prefix_caching:
            raise ConfigError(
                name, value, "nothing is kept with enable_prefix_caching=False.",
                "Leave it out, or set enable_prefix_caching=True.",
            )  # fmt: skip


def _refuse_not_offered(config: EngineConfig) -> None:
    refusals = (
        ("speculative_config", config.speculative_config, None),
        ("quantization", config.quantization, None),
        ("tensor_parallel_size", config.tensor_parallel_size, 1),
    )
    for name, value, works in refusals:
        if value != works:
            raise ConfigError(name, value, "not offered yet.", f"Use {name}={works!r}.")


def _weight_dtype(asked: str, checkpoint: torch.dtype | None, device: Device) -> torch.dtype:
    if asked == "auto":
        dtype = checkpoint if checkpoint in DTYPES.values() else torch.float32
        assert dtype is not None
    elif asked in DTYPES:
        dtype = DTYPES[asked]
    else:
        raise ConfigError("dtype", asked, "not a precision of weights.", f"Use {_DTYPE_NAMES}.")
    if dtype is torch.bfloat16 and device.type == "cuda" and device.capability < (8, 0):
        if asked == "auto":
            log.warning("%s has no bfloat16: the weights are held in float16", device.name)
            return torch.float16
        raise ConfigError("dtype", asked, f"{device.name} has no bfloat16.", 'Use dtype="float16".')
    return dtype


def _conv_dtype(asked: str, act_dtype: torch.dtype) -> torch.dtype:
    if asked == "auto" or DTYPES.get(asked) is act_dtype:
        return act_dtype
    name = str(act_dtype).removeprefix("torch.")
    raise ConfigError(
        "mamba_cache_dtype", asked, "windows are held in the precision of the activations.",
        f'Use "auto" or "{name}".',
    )  # fmt: skip


def _ssm_dtype(asked: str, checkpoint: torch.dtype | None) -> torch.dtype:
    if asked == "auto":
        return checkpoint if checkpoint in STATE_DTYPES.values() and checkpoint else torch.float32
    if asked not in STATE_DTYPES:
        raise ConfigError(
            "mamba_ssm_cache_dtype", asked, "states can't be kept in this precision.", f"Use {_STATE_NAMES}."
        )
    return STATE_DTYPES[asked]


def _max_model_len(asked: int | None, hard_limit: int | None) -> int:
    if hard_limit is not None:
        if asked is not None and asked > hard_limit:
            raise ConfigError(
                "max_model_len", asked, f"the model ends at {hard_limit} tokens.",
                f"Use at most {hard_limit}.",
            )  # fmt: skip
        return asked or hard_limit
    if asked is None:
        log.info(
            "max_model_len is %d: a recurrent state has no limit of its own, so this one is generous (where "
            "attention needs pages, what they hold); set max_model_len to change it",
            DEFAULT_MAX_MODEL_LEN,
        )
    return asked or DEFAULT_MAX_MODEL_LEN


DEFAULT_NUM_SEQS = {"cpu": 32, "cuda": 256}
DEFAULT_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}


def settle_slots(
    config: EngineConfig, device: Device, bytes_per_slot: int, free_bytes: int
) -> tuple[SchedulerLimits, int]:
    """Choose how many states are held, and with them how many sequences run at once.

    Args:
        bytes_per_slot: one sequence's states over all layers.
        free_bytes: what states may take beside the weights.

    Returns:
        the scheduler's limits and the number of slots.

    Raises:
        ConfigError: not even one state fits, or ``num_state_slots`` asks for more than fit.
    """
    fit = free_bytes // bytes_per_slot - 1  # one row is the scratch slot
    if fit < 1:
        raise ConfigError(
            "num_state_slots", config.num_state_slots,
            f"no state fits: one takes {bytes_per_slot} bytes (and one more is scratch), "
            f"{max(free_bytes, 0)} are free.",
            "Free memory, or raise gpu_memory_utilization.",
        )  # fmt: skip
    slots = config.num_state_slots
    if slots is not None and slots > fit:
        raise ConfigError("num_state_slots", slots, f"only {fit} states fit.", f"Use at most {fit}.")
    wanted = config.max_num_seqs or DEFAULT_NUM_SEQS[device.type]
    slots = slots or min(wanted, fit)
    if slots < wanted:
        if config.max_num_seqs is not None:
            log.warning(
                "max_num_seqs=%d is more than the %d state slots: %d sequences run at once, others wait",
                wanted, slots, slots,
            )  # fmt: skip
        wanted = slots
    tokens = config.max_num_batched_tokens or max(DEFAULT_BATCHED_TOKENS[device.type], wanted)
    return SchedulerLimits(wanted, tokens, config.max_queue_len), slots


#: Of memory for kept states on a CPU, where nobody said how much.
DEFAULT_CPU_CACHE_BYTES = 1 << 30


def settle_snapshots(config: EngineConfig, device: Device, bytes_per_slot: int, left_bytes: int) -> int:
    """Choose how many kept states the device's memory holds.

    Args:
        bytes_per_slot: one state.
        left_bytes: what is free beside weights and slots.

    Raises:
        ConfigError: ``prefix_cache_bytes`` holds no state, or more than is free.
    """
    if not config.enable_prefix_caching:
        return 0
    asked = config.prefix_cache_bytes
    if asked is not None and not bytes_per_slot <= asked <= left_bytes:
        raise ConfigError(
            "prefix_cache_bytes", asked,
            f"one state takes {bytes_per_slot} bytes, and {max(left_bytes, 0)} are free.",
            "Use a number between, or enable_prefix_caching=False.",
        )  # fmt: skip
    if asked is None:
        asked = left_bytes // 2
        if device.type == "cpu":
            asked = min(asked, max(DEFAULT_CPU_CACHE_BYTES, bytes_per_slot))
    rows = max(asked, 0) // bytes_per_slot
    if rows == 0:
        log.warning(
            "prefix caching is off: no memory is left for kept states (one takes %d bytes); use fewer "
            "num_state_slots, or free memory",
            bytes_per_slot,
        )
    return rows
