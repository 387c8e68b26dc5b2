"""The one owner of a state's shape, dtype and size in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

#: Offsets of tensors inside a slot are multiples of this many bytes, so that wide loads stay aligned.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layer's state, for one sequence."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A layer's state for one sequence: its kind and its tensors, in the order of the typed view."""

    kind: str
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class ConvSSM(NamedTuple):
    """State of a Mamba layer, a row a slot, written in place by the mixer.

    conv: (slots, conv_channels, W - 1), last inputs of the convolution.
    ssm: (slots, channels, N) for Mamba-1, (slots, H, P, N) for Mamba-2.
    """

    conv: Tensor
    ssm: Tensor


def mamba1_state(
    channels: int,
    state_size: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype = torch.float32,
) -> StateSpec:
    """State of a Mamba-1 layer."""
    return StateSpec(
        "mamba1",
        (
            TensorSpec("conv", (channels, conv_kernel - 1), conv_dtype),
            TensorSpec("ssm", (channels, state_size), ssm_dtype),
        ),
    )


def mamba2_state(
    num_heads: int,
    head_dim: int,
    num_groups: int,
    state_size: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype = torch.float32,
) -> StateSpec:
    """State of a Mamba-2 layer; the convolution runs over x, B and C."""
    conv_channels = num_heads * head_dim + 2 * num_groups * state_size
    return StateSpec(
        "mamba2",
        (
            TensorSpec("conv", (conv_channels, conv_kernel - 1), conv_dtype),
            TensorSpec("ssm", (num_heads, head_dim, state_size), ssm_dtype),
        ),
    )
