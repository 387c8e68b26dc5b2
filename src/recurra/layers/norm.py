"""Norms with weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recurra.layers.dtypes import Dtypes, parameter
from recurra.ops import Ops


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension; (rows, width) in x's dtype.

    The weight is float32 at least: some checkpoints hold its distance from one, and the sum needs more than 16 bits.
    """

    def __init__(self, width: int, eps: float, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtypes.recurrence, device=device)
        self.eps = eps
        self._rms_norm, self._add_rms_norm = ops.rms_norm, ops.add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self.eps)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of ``residual + x``, in x's dtype, and the sum, in the residual's: one kernel for both."""
        return self._add_rms_norm(x, residual, self.weight, self.eps)


class LayerNorm(nn.Module):
    """``(x - mean) / sqrt(variance + eps) * weight + bias`` over the last dimension; (rows, width) in x's dtype."""

    def __init__(self, width: int, eps: float, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtypes.recurrence, device=device)
        self.bias = parameter(width, dtype=dtypes.recurrence, device=device)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(self.weight.dtype)
        return F.layer_norm(wide, (x.shape[-1],), self.weight, self.bias, self.eps).to(x.dtype)


class RMSNormGrouped(RMSNorm):
    """The same within each group of ``group_size`` columns, every column with a weight of its own."""

    def __init__(
        self, width: int, group_size: int, eps: float, *, ops: Ops, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__(width, eps, ops=ops, dtypes=dtypes, device=device)
        self.group_size = group_size
        self._rms_norm_gated = ops.rms_norm_gated

    def forward(self, x: Tensor) -> Tensor:
        return self._rms_norm_gated(x, None, self.weight, self.eps, self.group_size)


class RMSNormGated(nn.Module):
    """``norm(x * silu(z)) * weight``, normalised within each group of ``group_size`` columns.

    Source: Mamba-2 (Dao and Gu, 2024), section 7.1; one group of the norm for each group of B and C.
    """

    def __init__(
        self, width: int, group_size: int, eps: float, *, ops: Ops, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtypes.act, device=device)
        self.group_size = group_size
        self.eps = eps
        self._rms_norm_gated = ops.rms_norm_gated

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self._rms_norm_gated(x, z, self.weight, self.eps, self.group_size)


class NormThenGate(nn.Module):
    """``norm(x) * weight * silu(z)``, normalised within each group of ``group_size`` columns."""

    def __init__(
        self, width: int, group_size: int, eps: float, *, ops: Ops, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtypes.act, device=device)
        self.group_size = group_size
        self.eps = eps
        self._rms_norm_gated = ops.rms_norm_gated

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self._rms_norm_gated(x, z, self.weight, self.eps, self.group_size, norm_before_gate=True)


class NormThenSigmoid(nn.Module):
    """``norm(x) * weight * sigmoid(z)``, normalised within each group of ``group_size`` columns."""

    def __init__(
        self, width: int, group_size: int, eps: float, *, ops: Ops, dtypes: Dtypes, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = parameter(width, dtype=dtypes.act, device=device)
        self.group_size = group_size
        self.eps = eps
        self._rms_norm_gated = ops.rms_norm_gated

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        normed = self._rms_norm_gated(x, None, self.weight, self.eps, self.group_size)
        return normed * torch.sigmoid(z)


class Gate(nn.Module):
    """``x * silu(z)``, without any norm."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return x * F.silu(z)
