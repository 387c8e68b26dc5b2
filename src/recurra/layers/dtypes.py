"""Which number format each kind of tensor has, decided once for a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Formats of one model's tensors.

    Attributes:
        weight: matrices (projections, embedding, head).
        act: activations, and the vectors that meet them (norm weights, biases, convolution filters).
        conv_state: windows of the convolution in the state pool.
        ssm_state: recurrent states in the state pool.
        kv_state: keys and values in the page pool; None: like activations.
        residual_in_fp32: keep the residual stream in float32 when activations are narrower.
    """

    weight: torch.dtype
    act: torch.dtype
    conv_state: torch.dtype
    ssm_state: torch.dtype = torch.float32
    residual_in_fp32: bool = True
    kv_state: torch.dtype | None = None

    @property
    def kv(self) -> torch.dtype:
        """Format of keys and values in the page pool."""
        return self.kv_state or self.act

    @property
    def recurrence(self) -> torch.dtype:
        """Format of A, D and dt_bias: float32 always (float64 when activations are)."""
        return torch.float64 if self.act == torch.float64 else torch.float32

    @property
    def residual(self) -> torch.dtype:
        """Format of the residual stream."""
        if self.act.itemsize >= 4 or not self.residual_in_fp32:
            return self.act
        return torch.float32


def parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A frozen parameter whose content the weight loader writes: it is allocated once, in its final form."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def optional(present: bool, *shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
    """A parameter that some checkpoints lack, such as a bias."""
    return parameter(*shape, dtype=dtype, device=device) if present else None


def tensor(parameter: nn.Parameter | None) -> Tensor | None:
    """The parameter's values without its autograd skin."""
    return None if parameter is None else parameter.data
