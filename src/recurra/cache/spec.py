"""The one owner of a state's shape, dtype and size in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recurra.rounding import NEAREST, SCALE_DTYPE, SCALED, Rounding

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


_NO_SCALE = torch.zeros(0, 0, dtype=SCALE_DTYPE)


class ConvSSM(NamedTuple):
    """State of a recurrent layer, a row a slot, written in place by the mixer.

    conv: (slots, conv_channels, W - 1), last inputs of the convolution; (slots, 0) in lightning attention,
        which has none.
    ssm: (slots, channels, N) for Mamba-1, (slots, H, P, N) for Mamba-2, (slots, H, K, V) for lightning
        attention and delta rules, (slots, H, P) for real-gated units; (slots, 0) in a short convolution.
    scale: of each row of an 8-bit ssm, (slots, ..., rows) bfloat16; (slots, 0) in other formats.
    rounding: how ssm is rounded when it is written.
    """

    conv: Tensor
    ssm: Tensor
    scale: Tensor = _NO_SCALE
    rounding: Rounding = NEAREST


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of an attention layer, for one token. They live in pages, not in slots.

    Attributes:
        num_heads: heads of keys and values.
        key_dim: K, of a key.
        value_dim: V, of a value; 0 where values are a part of the keys.
        dtype: of both.
        window: positions that a query sees, its own included; 0 is all of them.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of one token."""
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


class PagedKV(NamedTuple):
    """Keys and values of an attention layer, written in place by the mixer.

    k: (pages, page size, heads, K); v: (pages, page size, heads, V).
    """

    k: Tensor
    v: Tensor


#: What a mixer remembers, as a recipe and as the typed view that it is handed.
AnySpec = StateSpec | KVSpec
LayerState = ConvSSM | PagedKV


def recurrent(specs: tuple[AnySpec, ...]) -> tuple[StateSpec, ...]:
    """Those that take a part of a sequence's slot."""
    return tuple(spec for spec in specs if isinstance(spec, StateSpec))


def paged(specs: tuple[AnySpec, ...]) -> tuple[KVSpec, ...]:
    """Those whose tokens take a part of a page."""
    return tuple(spec for spec in specs if isinstance(spec, KVSpec))


def join_layers(
    specs: tuple[AnySpec, ...], slots: tuple[ConvSSM, ...], pages: tuple[PagedKV, ...]
) -> tuple[LayerState, ...]:
    """The views of both pools in the order of ``specs``."""
    of_slots, of_pages = iter(slots), iter(pages)
    return tuple(next(of_slots) if isinstance(spec, StateSpec) else next(of_pages) for spec in specs)


def scale_spec(shape: tuple[int, ...], dtype: torch.dtype) -> TensorSpec:
    """Scales of a state's rows: one for each row of the last dimension in 8 bits, none in other formats."""
    return TensorSpec("scale", shape[:-1] if dtype in SCALED else (0,), SCALE_DTYPE)


def _recurrent(kind: str, conv: TensorSpec, shape: tuple[int, ...], dtype: torch.dtype) -> StateSpec:
    return StateSpec(kind, (conv, TensorSpec("ssm", shape, dtype), scale_spec(shape, dtype)))


def mamba1_state(
    channels: int,
    state_size: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype = torch.float32,
) -> StateSpec:
    """State of a Mamba-1 layer."""
    conv = TensorSpec("conv", (channels, conv_kernel - 1), conv_dtype)
    return _recurrent("mamba1", conv, (channels, state_size), ssm_dtype)


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
    conv = TensorSpec("conv", (conv_channels, conv_kernel - 1), conv_dtype)
    return _recurrent("mamba2", conv, (num_heads, head_dim, state_size), ssm_dtype)


def lightning_state(
    num_heads: int, key_dim: int, value_dim: int, ssm_dtype: torch.dtype = torch.float32
) -> StateSpec:
    """State of a lightning attention layer: a sum of keys times values, and no convolution."""
    conv = TensorSpec("conv", (0,), ssm_dtype)
    return _recurrent("lightning", conv, (num_heads, key_dim, value_dim), ssm_dtype)


def delta_state(
    num_key_heads: int,
    num_value_heads: int,
    key_dim: int,
    value_dim: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype = torch.float32,
) -> StateSpec:
    """State of a gated delta net or Kimi delta attention layer; the convolution runs over q, k and v."""
    conv_channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
    conv = TensorSpec("conv", (conv_channels, conv_kernel - 1), conv_dtype)
    return _recurrent("delta", conv, (num_value_heads, key_dim, value_dim), ssm_dtype)


def rg_lru_state(
    num_blocks: int,
    block_width: int,
    conv_kernel: int,
    conv_dtype: torch.dtype,
    ssm_dtype: torch.dtype = torch.float32,
) -> StateSpec:
    """State of a real-gated linear recurrent unit: one number a channel, in the blocks of its gates."""
    conv = TensorSpec("conv", (num_blocks * block_width, conv_kernel - 1), conv_dtype)
    return _recurrent("rg_lru", conv, (num_blocks, block_width), ssm_dtype)


def short_conv_state(channels: int, conv_kernel: int, conv_dtype: torch.dtype) -> StateSpec:
    """State of a gated short convolution: its window alone."""
    return _recurrent(
        "short_conv", TensorSpec("conv", (channels, conv_kernel - 1), conv_dtype), (0,), conv_dtype
    )
