"""mamba_ssm's and vLLM's gated norms."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.errors import RefusedArgumentError
from recurra.ops.compat.calls import dense, operator, refuse_gradients
from recurra.ops.precision import wide


def rmsnorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    upcast: bool = True,
) -> Tensor:
    """RMS norm over groups of the last dimension, gated (mamba_ssm's ``layernorm_gated.rmsnorm_fn``).

    With ``norm_before_gate`` ``(norm(x) * weight + bias) * silu(z)``, else ``norm(x * silu(z)) * weight + bias``.

    Args:
        x: (..., width), any strides. z: like x, or None for no gate.
        weight, bias: (width,); bias may be None.
        group_size: columns normalised together; None: all.
        upcast: has to be True: the norm is always computed in float32.

    Returns:
        like x.

    Raises:
        RefusedArgumentError: ``upcast=False``, a group size that doesn't divide the width; gradients.
    """
    name = "rmsnorm_fn"
    refuse_gradients(name, x=x, weight=weight, bias=bias, z=z)
    size = _group(name, x, group_size)
    if not upcast:
        raise RefusedArgumentError(name, "upcast", "False is not served.", "Leave it True.")
    rows = dense(x.reshape(-1, x.shape[-1]))
    gate = None if z is None else dense(z.reshape(-1, x.shape[-1]))
    norm = operator("rms_norm_gated", x)
    if bias is None:
        y: Tensor = norm(rows, gate, weight, eps, size, norm_before_gate=norm_before_gate)
        return y.view(x.shape)
    # The bias comes between norm and gate: it is added in float32.
    exact = wide(x)
    y = norm(rows.to(exact), None if norm_before_gate or gate is None else gate.to(exact), weight, eps, size)
    return _gated(y + bias.to(exact), gate if norm_before_gate else None).to(x.dtype).view(x.shape)


def layernorm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
) -> Tensor:
    """Layer norm over groups of the last dimension, gated (mamba_ssm's ``layernorm_gated.layernorm_fn``).

    Args:
        x, weight, bias, z, eps, group_size, norm_before_gate: as in :func:`rmsnorm_fn`.
        is_rms_norm: leave the mean alone, which is :func:`rmsnorm_fn`.

    Returns:
        like x.

    Raises:
        RefusedArgumentError: a group size that doesn't divide the width; gradients.
    """
    if is_rms_norm:
        return rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate)
    name = "layernorm_fn"
    refuse_gradients(name, x=x, weight=weight, bias=bias, z=z)
    size, exact = _group(name, x, group_size), wide(x)
    value = x.to(exact)
    if z is not None and not norm_before_gate:
        value = _gated(value, z)
    y = F.layer_norm(value.reshape(*value.shape[:-1], -1, size), (size,), eps=eps).flatten(-2) * weight.to(
        exact
    )
    if bias is not None:
        y = y + bias.to(exact)
    return _gated(y, z if norm_before_gate else None).to(x.dtype)


def _gated(y: Tensor, z: Tensor | None) -> Tensor:
    return y if z is None else y * F.silu(z.to(y.dtype))


def _group(name: str, x: Tensor, group_size: int | None) -> int:
    size = x.shape[-1] if group_size is None else group_size
    if size < 1 or x.shape[-1] % size:
        raise RefusedArgumentError(
            name, "group_size", f"{size} does not divide the width {x.shape[-1]}.", "Use one of its divisors."
        )
    return size


def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """:func:`rmsnorm_fn` under vLLM's name."""
    return rmsnorm_fn(x, weight, bias, z, eps, group_size, norm_before_gate)


class RMSNorm(torch.nn.Module):
    """:func:`rmsnorm_fn` as a module with mamba_ssm's parameters; it has no bias."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """See :func:`rmsnorm_fn`."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)
