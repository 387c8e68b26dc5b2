"""The operators: one frozen table of callables, built once for a device.

>>> ops = build(detect("cpu"))
>>> y = ops.rms_norm(x, weight, 1e-5)

The field's functions are here under their own names as well, for the tensors' device (see :mod:`recurra.ops.compat`):

>>> from recurra.ops import causal_conv1d_fn, mamba_chunk_scan_combined, selective_state_update
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from recurra.device import Device
from recurra.errors import ConfigError
from recurra.ops.add_norm import AddRMSNorm
from recurra.ops.attention import AttentionUpdate, AttentionVarlen, StoreKV
from recurra.ops.conv1d import CausalConv1dUpdate, CausalConv1dVarlen
from recurra.ops.decode_stack import BuildDecodeStack
from recurra.ops.delta import GatedDeltaRuleUpdate, GatedDeltaRuleVarlen
from recurra.ops.linear import Linear, LinearScaled
from recurra.ops.linear_attention import LightningAttentionUpdate, LightningAttentionVarlen
from recurra.ops.moe import ExpertMLP
from recurra.ops.norm import RMSNorm, RMSNormGated
from recurra.ops.registry import BACKENDS, OPERATORS, Choice, choose, lacks, refusal
from recurra.ops.replay import ReplayFold, ReplayStateUpdate
from recurra.ops.rg_lru import RGLRUUpdate, RGLRUVarlen
from recurra.ops.several import CausalConv1dUpdateVarlen, SelectiveStateUpdateVarlen
from recurra.ops.short_conv import ShortConvUpdate, ShortConvVarlen
from recurra.ops.ssm import SelectiveScanVarlen, SelectiveStateUpdate, SSDVarlen

__all__ = ["BACKENDS", "Choice", "Ops", "build"]


@dataclass(frozen=True, slots=True)
class Ops:
    """The operators of one device. ``choices`` says which backend serves each, and why."""

    linear: Linear
    linear_scaled: LinearScaled
    rms_norm: RMSNorm
    rms_norm_gated: RMSNormGated
    add_rms_norm: AddRMSNorm
    causal_conv1d_varlen: CausalConv1dVarlen
    causal_conv1d_update: CausalConv1dUpdate
    selective_scan_varlen: SelectiveScanVarlen
    mamba_chunk_scan_varlen: SSDVarlen
    selective_state_update: SelectiveStateUpdate
    causal_conv1d_update_varlen: CausalConv1dUpdateVarlen
    selective_state_update_varlen: SelectiveStateUpdateVarlen
    replay_state_update: ReplayStateUpdate
    replay_fold: ReplayFold
    lightning_attention_varlen: LightningAttentionVarlen
    lightning_attention_update: LightningAttentionUpdate
    gated_delta_rule_varlen: GatedDeltaRuleVarlen
    gated_delta_rule_update: GatedDeltaRuleUpdate
    rg_lru_varlen: RGLRUVarlen
    rg_lru_update: RGLRUUpdate
    short_conv_varlen: ShortConvVarlen
    short_conv_update: ShortConvUpdate
    store_kv: StoreKV
    attention_varlen: AttentionVarlen
    attention_update: AttentionUpdate
    expert_mlp: ExpertMLP
    build_decode_stack: BuildDecodeStack | None
    choices: tuple[Choice, ...]


def _order(requested: str | None) -> tuple[str, ...]:
    """Preference with the requested backend first; asking for the reference means it alone."""
    if requested is None:
        return BACKENDS
    if requested == "reference":
        return ("reference",)
    return (requested, *(b for b in BACKENDS if b != requested))


def build(
    device: Device,
    backend: str | None = None,
    prefill_backend: str | None = None,
    ssu_algorithm: str | None = None,
) -> Ops:
    """Choose every operator once.

    Args:
        device: where the tensors live.
        backend: ask for one backend; operators it lacks go to the next in :data:`BACKENDS`.
        prefill_backend: the same for the prefill scans; None follows ``backend``.
        ssu_algorithm: of FlashInfer's state update; None is its "auto".

    Raises:
        ConfigError: the backend asked for can't run on this device.
    """
    for setting, value in (("backend", backend), ("prefill_backend", prefill_backend)):
        if value is None:
            continue
        if value not in BACKENDS:
            raise ConfigError(setting, value, "unknown.", f"Valid: {', '.join(BACKENDS)}.")
        reason = refusal(value, device)
        if reason is None and setting == "prefill_backend" and value == "flashinfer":
            reason = lacks("mamba_chunk_scan_varlen", value, device)
        if reason is not None:
            usable = [b for b in BACKENDS if refusal(b, device) is None and b != value]
            raise ConfigError(setting, value, f"{reason}.", f"Usable here: {', '.join(usable)}.")
    decode_order, prefill_order = _order(backend), _order(prefill_backend or backend)
    choices, table = [], {}
    for operator in OPERATORS:
        order = prefill_order if operator.prefill else decode_order
        choice, function = choose(operator, device, order)
        assert function is not None or operator.optional, choice
        choices.append(choice)
        if choice.backend == "flashinfer" and operator.name == "selective_state_update":
            assert function is not None
            function = partial(function, algorithm=ssu_algorithm or "auto")
        table[operator.name] = function
    return Ops(**table, choices=tuple(choices))  # type: ignore[arg-type]


#: The field's names, where what they mean is the same in all projects, and the modules that serve them.
_PUBLIC = {
    "causal_conv1d_fn": "conv",
    "causal_conv1d_update": "conv",
    "chunk_gated_delta_rule": "fla",
    "chunk_kda": "fla",
    "fused_recurrent_gated_delta_rule": "fla",
    "layernorm_fn": "norm",
    "mamba_chunk_scan_combined": "ssm",
    "mamba_chunk_scan_combined_varlen": "ssm",
    "rms_norm_gated": "norm",
    "rmsnorm_fn": "norm",
    "selective_scan_fn": "ssm",
    "selective_state_update": "ssm",
    "ssd_bmm": "parts",
    "ssd_chunk_scan": "parts",
    "ssd_chunk_state": "parts",
    "ssd_state_passing": "parts",
}


def __getattr__(name: str) -> Any:
    """The field's functions, imported when they are first asked for."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"recurra.ops.compat.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
