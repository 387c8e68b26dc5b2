"""FlashInfer's state update. Untested against the real package: what it is called with is held by a stand-in alone.

It serves Mamba-2 with states of 32 or 16 bits in whole slots; stochastic rounding is its own, for float16 states, and
its draws are others than ours.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from recurra.errors import ConfigError
from recurra.ops.rounding import NEAREST, SCALED, Rounding
from recurra.types import SCRATCH_SLOT

_NO_LIMIT = (0.0, float("inf"))


def _refuse(setting: str, value: Any, problem: str) -> None:
    raise ConfigError(setting, value, f"the flashinfer backend {problem}.", "Use backend='triton'.")


def _check(ssm_state: Tensor, dt_limit: tuple[float, float], rounding: Rounding) -> None:
    if ssm_state.dim() != 4:
        _refuse("backend", "flashinfer", "updates Mamba-2's states alone, and this layer is Mamba-1's")
    if tuple(dt_limit) != _NO_LIMIT:
        _refuse("time_step_limit", dt_limit, "has no bounds of the step size")
    if ssm_state.dtype in SCALED:
        _refuse("mamba_ssm_cache_dtype", ssm_state.dtype, "has no scales of this form")
    if rounding.stochastic and ssm_state.dtype != torch.float16:
        _refuse("enable_stochastic_rounding", True, "rounds float16 states by chance, and no others")


def selective_state_update(
    ssm_state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    slots: Tensor,
    *,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    state_scale: Tensor | None = None,
    rounding: Rounding = NEAREST,
    algorithm: str = "auto",
) -> Tensor:
    """See :class:`recurra.ops.ssm.SelectiveStateUpdate`.

    Args:
        algorithm: FlashInfer's: auto, simple, vertical or horizontal.

    Raises:
        ConfigError: Mamba-1, bounds of the step size, 8-bit states, or chance with states that aren't float16.
    """
    del state_scale
    _check(ssm_state, dt_limit, rounding)
    heads, dim, size = ssm_state.shape[1:]
    skip = torch.zeros(heads, dtype=A.dtype, device=A.device) if D is None else D
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    chance = (
        {"rand_seed": rounding.seed + rounding.step, "philox_rounds": rounding.rounds}
        if rounding.stochastic
        else {}
    )
    # dt and what is added to it share a dtype there: float32, so that the bias keeps its digits.
    importlib.import_module("flashinfer.mamba").selective_state_update(
        ssm_state, x.contiguous(), dt.float()[..., None].expand(-1, -1, dim),
        A[:, None, None].expand(-1, dim, size), B.contiguous(), C.contiguous(),
        (skip[:, None] if skip.dim() == 1 else skip).float().expand(-1, dim),
        z=None if z is None else z.contiguous(),
        dt_bias=None if dt_bias is None else dt_bias.float()[:, None].expand(-1, dim), dt_softplus=dt_softplus,
        state_batch_indices=slots, pad_slot_id=SCRATCH_SLOT, out=out, algorithm=algorithm, **chance,
    )  # fmt: skip
    return out
