"""A whole decode step of a stack of Mamba blocks as one compiled call.

On a CPU the op-by-op path costs more in dispatch than in arithmetic, so a backend may offer to run
embedding, every block and the final norm at once for the decode rows of a step. What it computes is
exactly the composition of the single operators; tests hold it against them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from recurra.ops.rounding import NEAREST, Rounding


@dataclass(frozen=True, slots=True)
class Mamba1Weights:
    """One Mamba-1 block. Vectors and A are float32; matrices are stored in the weights' dtype."""

    norm: Tensor  # (hidden,)
    norm_eps: float
    in_proj: Tensor  # (2 * channels, hidden): x rows, then z rows
    in_proj_bias: Tensor | None
    conv_weight: Tensor  # (channels, W)
    conv_bias: Tensor | None
    x_proj: Tensor  # (dt_rank + 2 * N, channels): dt, B, C
    dt_proj: Tensor  # (channels, dt_rank)
    dt_bias: Tensor  # (channels,)
    A: Tensor  # (channels, N), negative
    D: Tensor  # (channels,)
    out_proj: Tensor  # (hidden, channels)
    out_proj_bias: Tensor | None
    bcdt_norm_eps: float | None  # FalconMamba's norms without weights on B, C and dt; None: no norms


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """One Mamba-2 block. Vectors are float32; matrices are stored in the weights' dtype."""

    norm: Tensor  # (hidden,)
    norm_eps: float
    in_proj: Tensor  # (2 * H * P + 2 * G * N + H, hidden): z, x, B, C, dt rows
    in_proj_bias: Tensor | None
    conv_weight: Tensor  # (H * P + 2 * G * N, W)
    conv_bias: Tensor | None
    dt_bias: Tensor  # (H,)
    A: Tensor  # (H,), negative
    D: Tensor  # (H,)
    dt_limit: tuple[float, float]
    gated_norm: Tensor  # (H * P,)
    gated_norm_eps: float
    gated_norm_group: int
    out_proj: Tensor  # (hidden, H * P)
    out_proj_bias: Tensor | None
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int


@dataclass(frozen=True, slots=True)
class StackWeights:
    """Embedding, blocks and final norm of a pure Mamba model; residuals are float32."""

    embedding: Tensor  # (vocabulary, hidden)
    blocks: tuple[Mamba1Weights | Mamba2Weights, ...]
    final_norm: Tensor  # (hidden,)
    final_norm_eps: float


class BlockState(NamedTuple):
    """A block's view of the pool.

    conv: (slots, channels, W - 1). ssm: (slots, ..., N), of any format of :mod:`recurra.ops.rounding`, with the
    scales of its rows, if it has any, and how it is rounded.
    """

    conv: Tensor
    ssm: Tensor
    scale: Tensor | None = None
    rounding: Rounding = NEAREST


class DecodeStack(Protocol):
    """A compiled step.

    Args:
        token_ids: (S,) int64, one new token of each sequence.
        slots: (S,) int32, state-pool rows, states are updated in place.

    Returns:
        (S, hidden) float32, after the final norm; the caller applies the head.
    """

    def __call__(self, token_ids: Tensor, slots: Tensor) -> Tensor: ...


class BuildDecodeStack(Protocol):
    """Compile (or load from the on-disk cache) and bind a step to weights and states.

    Args:
        weights: the stack.
        states: for each block its views of the pool.
        num_threads: CPU threads of a step.
    """

    def __call__(
        self,
        weights: StackWeights,
        states: tuple[BlockState, ...],
        num_threads: int,
    ) -> DecodeStack: ...
