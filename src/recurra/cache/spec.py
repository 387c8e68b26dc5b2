"""The one owner of a state's shape, dtype and size in bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recurra.errors import ConfigError
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


# --- vLLM's calculators ----------------------------------------------------------------------------

#: Names of state dtypes in settings.
_DTYPE_NAMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}


def shard(setting: str, total: int, ranks: int) -> int:
    """One rank's share.

    Raises:
        ConfigError: it doesn't come out even.
    """
    if total % ranks:
        even = [n for n in range(1, ranks + 1) if total % n == 0]
        raise ConfigError(
            "tensor_parallel_size", ranks, f"it does not divide {setting}={total}.", f"Use {even[-1]}."
        )
    return total // ranks


def extra_groups_for_head_shards(num_groups: int, ranks: int) -> int:
    """Copies of groups of B and C that are added so that each rank has those of its own heads.

    Groups that divide among the ranks are cut; with fewer groups than ranks, which must then divide the ranks, each
    rank holds one whole group.

    Raises:
        ConfigError: neither divides the other.
    """
    if num_groups % ranks == 0:
        return 0
    if ranks % num_groups == 0:
        return ranks - num_groups
    even = [n for n in range(1, ranks + 1) if num_groups % n == 0 or n % num_groups == 0]
    raise ConfigError(
        "tensor_parallel_size",
        ranks,
        f"neither it nor n_groups={num_groups} divides the other.",
        f"Use {even[-1]}.",
    )


class MambaStateShapeCalculator:
    """Shapes of one rank's states of one sequence, in the order conv, then recurrent (vLLM's class of this name).

    Windows are (channels, W - 1), as the pool keeps them. ``num_spec`` more inputs are kept for speculation (see
    :mod:`recurra.ops.several`). Every method raises ConfigError where the ranks don't divide what is cut.
    """

    @staticmethod
    def linear_attention_state_shape(
        num_heads: int, tp_size: int, head_dim: int
    ) -> tuple[tuple[int, int, int]]:
        """(H, K, V) of lightning attention."""
        return ((shard("num_heads", num_heads, tp_size), head_dim, head_dim),)

    @staticmethod
    def mamba1_state_shape(
        tp_world_size: int, intermediate_size: int, state_size: int, conv_kernel: int
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Window and (channels, N)."""
        channels = shard("intermediate_size", intermediate_size, tp_world_size)
        return (channels, conv_kernel - 1), (channels, state_size)

    @staticmethod
    def extra_groups_for_head_shards(ngroups: int, tp_size: int) -> int:
        """See :func:`extra_groups_for_head_shards`."""
        return extra_groups_for_head_shards(ngroups, tp_size)

    @staticmethod
    def mamba2_state_shape(
        tp_world_size: int,
        intermediate_size: int,
        n_groups: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        conv_kernel: int,
        num_spec: int = 0,
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Window over x, B and C, and (H, P, N); groups are copied where ranks share one."""
        groups = n_groups + extra_groups_for_head_shards(n_groups, tp_world_size)
        channels = shard("intermediate_size", intermediate_size, tp_world_size)
        conv = channels + 2 * (groups // tp_world_size) * state_size
        heads = shard("num_heads", num_heads, tp_world_size)
        return (conv, conv_kernel - 1 + num_spec), (heads, head_dim, state_size)

    @staticmethod
    def short_conv_state_shape(
        tp_world_size: int, intermediate_size: int, conv_kernel: int
    ) -> tuple[tuple[int, int]]:
        """The window alone."""
        return ((shard("intermediate_size", intermediate_size, tp_world_size), conv_kernel - 1),)

    @staticmethod
    def gated_delta_net_state_shape(
        tp_world_size: int,
        num_k_heads: int,
        num_v_heads: int,
        head_k_dim: int,
        head_v_dim: int,
        conv_kernel_size: int,
        num_spec: int = 0,
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Window over q, k and v, and (Hv, K, V) as it is kept here (vLLM's has V first)."""
        keys = shard("num_k_heads", num_k_heads, tp_world_size) * head_k_dim
        heads = shard("num_v_heads", num_v_heads, tp_world_size)
        window = (2 * keys + heads * head_v_dim, conv_kernel_size - 1 + num_spec)
        return window, (heads, head_k_dim, head_v_dim)

    @staticmethod
    def kda_state_shape(
        tp_world_size: int, num_heads: int, head_dim: int, conv_kernel_size: int = 4, num_spec: int = 0
    ) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """Kimi delta attention: as many key heads as value heads, one dimension, one window over q, k and v."""
        return MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp_world_size, num_heads, num_heads, head_dim, head_dim, conv_kernel_size, num_spec
        )


class MambaStateDtypeCalculator:
    """Dtypes of states from the settings (vLLM's class of this name), in the order of the shapes.

    "auto" is the model's dtype for windows, and float32 for recurrent states: theirs sum over thousands of tokens.
    Every method raises ConfigError for a name that states aren't kept in.
    """

    @staticmethod
    def _named(setting: str, name: str | torch.dtype, auto: torch.dtype) -> torch.dtype:
        if isinstance(name, torch.dtype):
            return name
        if name == "auto":
            return auto
        if name not in _DTYPE_NAMES:
            raise ConfigError(setting, name, "unknown.", f"Valid: auto, {', '.join(_DTYPE_NAMES)}.")
        return _DTYPE_NAMES[name]

    @staticmethod
    def linear_attention_state_dtype(
        model_dtype: torch.dtype, mamba_cache_dtype: str = "auto"
    ) -> tuple[torch.dtype]:
        """Of lightning attention's sums; auto is float32 whatever the model's dtype."""
        del model_dtype
        return (MambaStateDtypeCalculator._named("mamba_cache_dtype", mamba_cache_dtype, torch.float32),)

    @staticmethod
    def mamba1_state_dtype(
        model_dtype: torch.dtype, mamba_cache_dtype: str = "auto", mamba_ssm_cache_dtype: str = "auto"
    ) -> tuple[torch.dtype, torch.dtype]:
        """Window and state."""
        named = MambaStateDtypeCalculator._named
        conv = named("mamba_cache_dtype", mamba_cache_dtype, model_dtype)
        if conv in SCALED:
            raise ConfigError(
                "mamba_cache_dtype",
                mamba_cache_dtype,
                "windows have no scales.",
                'Use "auto", or 16 or 32 bits.',
            )
        return conv, named("mamba_ssm_cache_dtype", mamba_ssm_cache_dtype, torch.float32)

    mamba2_state_dtype = mamba1_state_dtype
    gated_delta_net_state_dtype = mamba1_state_dtype
    kda_state_dtype = mamba1_state_dtype

    @staticmethod
    def short_conv_state_dtype(
        model_dtype: torch.dtype, mamba_cache_dtype: str = "auto"
    ) -> tuple[torch.dtype]:
        """Of the window."""
        return (MambaStateDtypeCalculator.mamba1_state_dtype(model_dtype, mamba_cache_dtype)[0],)
