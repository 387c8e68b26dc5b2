"""Which file implements which operator for which backend, and when a backend can't be used."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from recurra.device import Device

#: Backends in the order in which they are preferred.
BACKENDS = ("triton", "flashinfer", "cpu", "torch", "reference")


@dataclass(frozen=True, slots=True)
class Operator:
    """One row of the operator table: a function name, found in ``<folder>/<backend>.py``."""

    name: str
    folder: str
    prefill: bool = False  # follows prefill_backend when that is set
    optional: bool = False  # without an implementation the entry is None (a fused extra)


OPERATORS = (
    Operator("linear", "linear"),
    Operator("linear_scaled", "linear"),
    Operator("rms_norm", "norm"),
    Operator("rms_norm_gated", "norm"),
    Operator("add_rms_norm", "add_norm"),
    Operator("causal_conv1d_varlen", "conv1d", prefill=True),
    Operator("causal_conv1d_update", "conv1d"),
    Operator("selective_scan_varlen", "ssm", prefill=True),
    Operator("mamba_chunk_scan_varlen", "ssm", prefill=True),
    Operator("selective_state_update", "ssm"),
    Operator("causal_conv1d_update_varlen", "several"),
    Operator("selective_state_update_varlen", "several"),
    Operator("replay_state_update", "replay"),
    Operator("replay_fold", "replay"),
    Operator("lightning_attention_varlen", "linear_attention", prefill=True),
    Operator("lightning_attention_update", "linear_attention"),
    Operator("gated_delta_rule_varlen", "delta", prefill=True),
    Operator("gated_delta_rule_update", "delta"),
    Operator("rg_lru_varlen", "rg_lru", prefill=True),
    Operator("rg_lru_update", "rg_lru"),
    Operator("short_conv_varlen", "short_conv", prefill=True),
    Operator("short_conv_update", "short_conv"),
    Operator("store_kv", "attention"),
    Operator("attention_varlen", "attention", prefill=True),
    Operator("attention_update", "attention"),
    Operator("expert_mlp", "moe"),
    Operator("build_decode_stack", "decode_stack", optional=True),
)


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves an operator, and why each backend before it does not.

    Attributes:
        operator: the operator's name.
        backend: the chosen backend, or "none" for an optional operator that no backend offers.
        refused: backend to reason, in order of preference.
    """

    operator: str
    backend: str
    refused: dict[str, str]


def refusal(backend: str, device: Device) -> str | None:
    """Why ``backend`` can't run on ``device``; None when it can."""
    on_gpu = device.type == "cuda"
    if backend == "triton":
        if not device.has_triton:
            return "triton is not installed"
        if not on_gpu and not device.triton_interpreter:
            return f"triton has no {device.type} target (set TRITON_INTERPRET=1 to interpret, slowly)"
    if backend == "flashinfer":
        if not on_gpu:
            return f"it has no {device.type} kernels"
        if not device.has_flashinfer:
            return "flashinfer is not installed (pip install flashinfer-python)"
    if backend == "cpu":
        if on_gpu:
            return "it computes on the CPU, and the device is a GPU"
        if not device.has_numba:
            return "numba is not installed"
    if backend == "torch" and not on_gpu:
        return "it serves GPUs; the cpu backend serves this device"
    return None


#: The least compute capability of FlashInfer's fused SSD scan.
_FUSED_SCAN = (10, 0)


def lacks(operator: str, backend: str, device: Device) -> str:
    """Why a backend that runs on ``device`` doesn't serve an operator."""
    if backend == "flashinfer" and operator == "mamba_chunk_scan_varlen":
        major, minor = device.capability
        if device.capability < _FUSED_SCAN:
            return f"its fused scan needs compute capability 10.0 or 10.3, and this GPU has {major}.{minor}"
        return "its fused scan isn't wired up, for want of a GPU that runs it to test on"
    return "it has no such operator"


def implementation(operator: Operator, backend: str) -> Callable[..., Any] | None:
    """The function of ``operator`` in ``backend``, or None if there is none."""
    module = f"recurra.ops.{operator.folder}.{backend}"
    if importlib.util.find_spec(module) is None:
        return None
    found = getattr(importlib.import_module(module), operator.name, None)
    return found if callable(found) else None


def choose(
    operator: Operator, device: Device, order: tuple[str, ...]
) -> tuple[Choice, Callable[..., Any] | None]:
    """Pick the first backend of ``order`` that can run ``operator`` on ``device``."""
    refused: dict[str, str] = {}
    for backend in order:
        reason = refusal(backend, device)
        function = implementation(operator, backend) if reason is None else None
        if function is not None:
            return Choice(operator.name, backend, refused), function
        refused[backend] = reason or lacks(operator.name, backend, device)
    return Choice(operator.name, "none", refused), None
