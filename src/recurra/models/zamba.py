"""Zamba: Mamba layers, and one transformer block that is called again and again between them.

    y  = shared(x, e)        e: the embedded tokens; the block sees them beside x, and keeps its keys call by call
    x += mamba(norm(x + linear(y)))                              where the block is called
    x += mamba(norm(x))                                          elsewhere

Every Mamba layer has a few heads, each with its own B, C and dt. Source: Zamba (Glorioso et al., 2024), section 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recurra.cache.spec import ConvSSM, LayerState, StateSpec, mamba1_state
from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.base import mix
from recurra.layers.conv import Conv1dWeights
from recurra.layers.dtypes import Dtypes, parameter
from recurra.layers.linear import Linear
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, HybridLM, outer_entries
from recurra.models.maps import at, attention_entries, draw_decays, gated_mlp_entries
from recurra.models.weights import Entry, Map, draw_ones, draw_steps, draw_zeros, filters, negative_exp
from recurra.ops import Ops
from recurra.types import ForwardBatch

#: Kinds of layers: Mamba alone, or after a call of the shared block. Older files say "mamba".
KINDS = ("mamba", "linear_attention", "hybrid")


@dataclass(frozen=True, slots=True)
class HeadsSizes:
    """Numbers of a Mamba layer whose channels are split into heads."""

    hidden: int
    num_heads: int
    channels: int
    state_size: int
    conv_kernel: int
    dt_rank: int
    use_bias: bool
    use_conv_bias: bool

    @property
    def head_dim(self) -> int:
        return self.channels // self.num_heads


@dataclass(frozen=True, slots=True)
class ZambaSizes:
    """``calls``: numbers of the layers that call the shared block."""

    calls: tuple[int, ...]
    attention: AttentionSizes
    mamba: HeadsSizes
    inner: int
    activation: str


def read(fields: Fields) -> ZambaSizes:
    """Numbers from transformers' ``ZambaConfig``."""
    hidden, channels = (
        fields.whole("hidden_size"),
        fields.whole("mamba_expand", 2) * fields.whole("hidden_size"),
    )
    heads = fields.whole("n_mamba_heads", 2)
    if channels % heads:
        raise fields.wrong("n_mamba_heads", f"must divide {channels}.")
    rank = fields.raw.get("mamba_dt_rank", "auto")
    fields.only({"hidden_mamba_act": ("silu", "swish")})
    return ZambaSizes(
        calls=read_calls(fields, _default_kinds),
        attention=_read_attention(fields),
        mamba=HeadsSizes(
            hidden=hidden,
            num_heads=heads,
            channels=channels,
            state_size=fields.whole("mamba_d_state", 16),
            conv_kernel=fields.whole("mamba_d_conv", 4, least=2),
            dt_rank=math.ceil(hidden / 16) if rank == "auto" else fields.whole("mamba_dt_rank"),
            use_bias=fields.flag("mamba_proj_bias", False),
            use_conv_bias=fields.flag("mamba_conv_bias", True),
        ),
        inner=fields.whole("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
    )


def read_calls(fields: Fields, default: Callable[[Fields], Iterable[str]]) -> tuple[int, ...]:
    """Layers that call a shared block, from the kinds of all.

    Raises:
        CheckpointError: an unknown kind, or no layer that calls it.
    """
    key = "layers_block_type" if fields.raw.get("layers_block_type") else "layer_types"
    if fields.raw.get(key):
        kinds: Iterable[str] = fields.choices(key, KINDS, fields.whole("num_hidden_layers"))
    else:
        kinds = default(fields)
    calls = tuple(i for i, kind in enumerate(kinds) if kind == "hybrid")
    if not calls:
        raise fields.wrong(key, "no layer is hybrid.")
    return calls


def _default_kinds(fields: Fields) -> Iterable[str]:
    period, offset = fields.whole("attn_layer_period", 6), fields.whole("attn_layer_offset", 4, least=0)
    rest = range(fields.whole("num_hidden_layers") - 3)
    return ["mamba", "mamba", "hybrid", *("hybrid" if i % period == offset else "mamba" for i in rest)]


def _read_attention(fields: Fields) -> AttentionSizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", 16)
    wide = fields.raw.get("attention_hidden_size") or 2 * hidden
    if wide != 2 * hidden:
        raise fields.wrong("attention_hidden_size", f"must be twice the hidden size, {2 * hidden}.")
    head_dim = (
        2 * hidden // heads
        if not fields.raw.get("attention_head_dim")
        else fields.whole("attention_head_dim")
    )
    return AttentionSizes(
        hidden=2 * hidden,
        out=hidden,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        # Half of what a head sees is the tokens themselves, and the scale counts the other half.
        scale=(head_dim / 2) ** -0.5,
    )


class MambaHeads(nn.Module):
    """Mamba with heads (see :class:`recurra.layers.base.Mixer`): B, C and dt of each are its own."""

    def __init__(self, sizes: HeadsSizes, *, ops: Ops, dtypes: Dtypes, device: torch.device) -> None:
        super().__init__()
        self.sizes, self._ops, self._dtypes = sizes, ops, dtypes
        inner, bias = sizes.channels, sizes.use_bias
        self.in_proj = Linear(sizes.hidden, 2 * inner, bias=bias, ops=ops, dtypes=dtypes, device=device)
        self.conv1d = Conv1dWeights(
            inner, sizes.conv_kernel, bias=sizes.use_conv_bias, dtypes=dtypes, device=device
        )
        heads, dim, rows = sizes.num_heads, sizes.head_dim, sizes.dt_rank + 2 * sizes.state_size
        self.x_proj = parameter(heads, rows, dim, dtype=dtypes.weight, device=device)
        self.dt_proj = parameter(heads, dim, sizes.dt_rank, dtype=dtypes.weight, device=device)
        self.dt_bias = parameter(inner, dtype=dtypes.recurrence, device=device)
        self.A = parameter(inner, sizes.state_size, dtype=dtypes.recurrence, device=device)
        self.D = parameter(inner, dtype=dtypes.recurrence, device=device)
        self.out_proj = Linear(inner, sizes.hidden, bias=bias, ops=ops, dtypes=dtypes, device=device)

    def state_spec(self) -> StateSpec:
        """Window (channels, W - 1) and state (channels, N) of one sequence, over all heads."""
        s = self.sizes
        return mamba1_state(
            s.channels, s.state_size, s.conv_kernel, self._dtypes.conv_state, self._dtypes.ssm_state
        )

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix packed prompts: x (prefill tokens, hidden); writes ``state`` in place."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        where = (batch.cu_seqlens, batch.prefill_slots, batch.has_state, batch.chunks)
        conv, scan = self.conv1d, self._ops.selective_scan_varlen
        u = self._ops.causal_conv1d_varlen(u, conv.weight, conv.bias, state.conv, *where, silu=True)
        heads = []
        for head, own in enumerate(self._heads()):
            dt, B, C = self._select(head, u[:, own])
            heads.append(
                scan(
                    u[:, own], dt, self.A[own], B, C, self.D[own], z[:, own], self.dt_bias[own],
                    state.ssm[:, own], *where, state_scale=_of(state.scale, own),
                    rounding=state.rounding.of_part(head),
                )
            )  # fmt: skip
        out: Tensor = self.out_proj(torch.cat(heads, dim=-1))
        return out

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        """Mix one token of each decoding sequence: x (num_decode, hidden); writes ``state`` in place."""
        u, z = self.in_proj(x).chunk(2, dim=-1)
        slots, conv, update = batch.decode_slots, self.conv1d, self._ops.selective_state_update
        u = self._ops.causal_conv1d_update(u, conv.weight, conv.bias, state.conv, slots, silu=True)
        heads = []
        for head, own in enumerate(self._heads()):
            dt, B, C = self._select(head, u[:, own])
            heads.append(
                update(
                    state.ssm[:, own], u[:, own], dt, self.A[own], B, C, self.D[own], z[:, own],
                    self.dt_bias[own], slots, state_scale=_of(state.scale, own),
                    rounding=state.rounding.of_part(head),
                )
            )  # fmt: skip
        out: Tensor = self.out_proj(torch.cat(heads, dim=-1))
        return out

    def _heads(self) -> list[slice]:
        """The channels of each head."""
        dim = self.sizes.head_dim
        return [slice(start, start + dim) for start in range(0, self.sizes.channels, dim)]

    def _select(self, head: int, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt (T, head dim) before its bias, B and C (T, N) of one head."""
        s, linear = self.sizes, self._ops.linear
        parts = [s.dt_rank, s.state_size, s.state_size]
        dt, B, C = torch.split(linear(u, self.x_proj[head]), parts, dim=-1)
        return linear(dt, self.dt_proj[head]), B, C


def _of(scale: Tensor, own: slice) -> Tensor:
    """A head's scales, where states have any."""
    return scale[:, own] if scale.shape[1] else scale


class SharedCall(nn.Module):
    """One call of a shared transformer block: (T, hidden) twice, to the same once; no residual stream inside."""

    def __init__(
        self, norm: nn.Module, attention: Attention, mlp_norm: nn.Module, mlp: nn.Module, act: torch.dtype
    ) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm, self.mlp, self._act = norm, attention, mlp_norm, mlp, act

    def forward(self, x: Tensor, embedded: Tensor, batch: ForwardBatch, state: LayerState) -> Tensor:
        both = self.norm(torch.cat((x, embedded), dim=-1)).to(self._act)
        out: Tensor = self.mlp(self.mlp_norm(mix(self.attention, both, batch, state)))
        return out


class ZambaLayer(nn.Module):
    """A Mamba layer, perhaps after a call of the shared block; it also sees the embedded tokens."""

    def __init__(self, norm: nn.Module, mixer: nn.Module, act: torch.dtype) -> None:
        super().__init__()
        self.norm, self.mixer, self._act = norm, mixer, act
        self.shared: SharedCall | None = None
        self.linear: nn.Module | None = None
        self.mixers: tuple[Any, ...] = (mixer,)

    def call(self, shared: SharedCall, linear: nn.Module) -> ZambaLayer:
        """The same layer, after a call of ``shared`` whose answer goes through ``linear``."""
        self.shared, self.linear = shared, linear
        self.mixers = (shared.attention, self.mixer)
        return self

    def forward(
        self, x: Tensor, embedded: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]
    ) -> Tensor:
        seen = x
        if self.shared is not None and self.linear is not None:
            seen = x + self.linear(self.shared(x, embedded, batch, states[0]))
        return x + mix(self.mixers[-1], self.norm(seen).to(self._act), batch, states[-1])


class ZambaLM(HybridLM):
    """Every layer is told the embedded tokens too."""

    def run_layers(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """See :class:`HybridLM`."""
        embedded, start = x, 0
        for layer in self.layers:
            assert isinstance(layer, ZambaLayer)
            x = layer(x, embedded, batch, states[start : start + len(layer.mixers)])
            start += len(layer.mixers)
        return x


def build(config: ModelConfig, parts: Build) -> ZambaLM:
    """Mamba layers, some of which call the one shared block."""
    sizes, tools, width, eps = config.sizes, parts.tools, config.hidden_size, config.norm_eps
    assert isinstance(sizes, ZambaSizes)
    shared = SharedCall(
        RMSNorm(2 * width, eps, **tools),
        Attention(sizes.attention, **tools),
        RMSNorm(width, eps, **tools),
        GatedMLP(width, sizes.inner, activation=sizes.activation, bias=False, **tools),
        parts.dtypes.act,
    )

    def layer(i: int) -> ZambaLayer:
        made = ZambaLayer(RMSNorm(width, eps, **tools), MambaHeads(sizes.mamba, **tools), parts.dtypes.act)
        return made.call(shared, Linear(width, width, bias=False, **tools)) if i in sizes.calls else made

    return ZambaLM(config, map(layer, range(config.num_layers)), parts)


def flat(value: Tensor) -> Tensor:
    """(heads, head dim, ...) to (channels, ...)."""
    return value.flatten(0, 1)


def flat_decay(value: Tensor) -> Tensor:
    """A of all channels from A_log by head."""
    return negative_exp(flat(value))


def apart(value: Tensor) -> Tensor:
    """Rows of x and of the gate, stored in turns, to all of x's, then all of the gate's."""
    return torch.cat((value[0::2], value[1::2]))


def mamba_entries(stored: str, target: str) -> tuple[Entry, ...]:
    """A Mamba layer with heads."""
    return (
        Entry(f"{stored}.in_proj.weight", f"{target}.in_proj.weight", apart),
        Entry(f"{stored}.in_proj.bias", f"{target}.in_proj.bias", apart, draw_zeros),
        Entry(f"{stored}.conv1d.weight", f"{target}.conv1d.weight", filters),
        Entry(f"{stored}.conv1d.bias", f"{target}.conv1d.bias", draw=draw_zeros),
        Entry(f"{stored}.x_proj_weight", f"{target}.x_proj"),
        Entry(f"{stored}.dt_proj_weight", f"{target}.dt_proj"),
        Entry(f"{stored}.dt_proj_bias", f"{target}.dt_bias", flat, draw_steps),
        Entry(f"{stored}.A_log", f"{target}.A", flat_decay, draw_decays),
        Entry(f"{stored}.D", f"{target}.D", flat, draw_ones),
        Entry(f"{stored}.out_proj.weight", f"{target}.out_proj.weight"),
        Entry(f"{stored}.out_proj.bias", f"{target}.out_proj.bias", draw=draw_zeros),
    )


def layer_entries(
    calls: Iterable[int], num_layers: int, mamba: Callable[[str, str], tuple[Entry, ...]]
) -> tuple[Entry, ...]:
    """Norms, mixers and the shared block's linear of all layers; a layer that calls keeps its Mamba deeper down."""

    def of(prefix: str) -> tuple[Entry, ...]:
        norm = Entry(f"{prefix}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones)
        return norm, *mamba(f"{prefix}.mamba", "layers.{i}.mixer")

    calling = set(calls)
    return (
        *at((i for i in range(num_layers) if i not in calling), of("model.layers.{i}")),
        *at(sorted(calling), of("model.layers.{i}.mamba_decoder")),
        Entry("model.layers.{i}.linear.weight", "layers.{i}.linear.weight"),
    )


def entries(config: ModelConfig) -> Map:
    """As transformers stores it: the shared block under the first layer that calls it."""
    sizes = config.sizes
    assert isinstance(sizes, ZambaSizes)
    stored, target = f"model.layers.{sizes.calls[0]}.shared_transf", f"layers.{sizes.calls[0]}.shared"
    return (
        *outer_entries(norm="model.final_layernorm.weight"),
        *layer_entries(sizes.calls, config.num_layers, mamba_entries),
        Entry(f"{stored}.input_layernorm.weight", f"{target}.norm.weight", draw=draw_ones),
        Entry(f"{stored}.pre_ff_layernorm.weight", f"{target}.mlp_norm.weight", draw=draw_ones),
        *attention_entries(sizes.attention, f"{stored}.self_attn", f"{target}.attention"),
        *gated_mlp_entries(sizes.inner, f"{stored}.feed_forward", f"{target}.mlp"),
    )


ZAMBA = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=True,
    handles=frozenset({"hidden_act"}),
)
