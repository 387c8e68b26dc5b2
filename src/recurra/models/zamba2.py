"""Zamba2: Mamba-2 layers, and a few transformer blocks that are called in turn, each call with small adapters of its own.

    qkv    = shared_qkv(n) + up(down(n)),    gate, up = shared_w_in(n) + up(down(n))       (adapters, call by call)

For the rest see :mod:`recurra.models.zamba`. Source: Zamba2 (Glorioso et al., 2024), section 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.linear import Linear
from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, outer_entries
from recurra.models.maps import attention_entries, mamba2_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, Rows, draw_ones, draw_zeros
from recurra.models.zamba import SharedCall, ZambaLayer, ZambaLM, layer_entries, read_calls


@dataclass(frozen=True, slots=True)
class Zamba2Sizes:
    """Numbers of all layers.

    Attributes:
        calls: layers that call a shared block, in order; call ``j`` is of block ``j % num_blocks``.
        rank: of the adapters; ``adapts_attention``: attention has some, as the MLP always does.
        bias: of Mamba's projections and the MLP's.
    """

    calls: tuple[int, ...]
    num_blocks: int
    attention: AttentionSizes
    mamba: Mamba2Sizes
    inner: int
    activation: str
    bias: bool
    rank: int
    adapts_attention: bool


def read(fields: Fields) -> Zamba2Sizes:
    """Numbers from transformers' ``Zamba2Config``."""
    hidden = fields.whole("hidden_size")
    bias = fields.flag("add_bias_linear", False)
    calls = read_calls(fields, _default_kinds)
    inner = 4 * hidden if fields.raw.get("intermediate_size") is None else fields.whole("intermediate_size")
    return Zamba2Sizes(
        calls=calls,
        num_blocks=min(fields.whole("num_mem_blocks", 1), len(calls)),
        attention=_read_attention(fields),
        mamba=_read_mamba(fields, bias),
        inner=inner,
        activation=fields.choice("hidden_act", ACTIVATIONS, "gelu"),
        bias=bias,
        rank=fields.whole("adapter_rank", 128),
        adapts_attention=fields.flag("use_shared_attention_adapter", False),
    )


def _default_kinds(fields: Fields) -> Iterable[str]:
    some = ["mamba"] * 5 + ["hybrid"]
    tail = ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2
    return ["mamba", *some * 7, *tail]


def _read_attention(fields: Fields) -> AttentionSizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", 32)
    head_dim = 2 * hidden // heads
    turns = fields.flag("use_mem_rope", False)
    return AttentionSizes(
        hidden=2 * hidden,
        out=hidden,
        num_heads=heads,
        num_kv_heads=heads
        if fields.raw.get("num_key_value_heads") is None
        else fields.whole("num_key_value_heads"),
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rotary=read_rotary(fields, head_dim) if turns else None,
    )


def _read_mamba(fields: Fields, bias: bool) -> Mamba2Sizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("n_mamba_heads", 8)
    channels = fields.whole("mamba_expand", 2) * hidden
    if channels % heads:
        raise fields.wrong("n_mamba_heads", f"must divide {channels}.")
    return Mamba2Sizes(
        hidden=hidden,
        num_heads=heads,
        head_dim=channels // heads,
        num_groups=fields.whole("mamba_ngroups", 1),
        state_size=fields.whole("mamba_d_state", 64),
        conv_kernel=fields.whole("mamba_d_conv", 4, least=2),
        norm_eps=1e-5,
        use_bias=bias,
        # Steps are bounded below by what the configuration calls the least step.
        dt_limit=(fields.number("time_step_min", 0.001), float("inf")),
    )


class AdaptedAttention(Attention):
    """Attention with another layer's projections and adapters of its own for queries, keys and values."""

    def __init__(self, sizes: AttentionSizes, rank: int, shared: Attention | None, parts: Build) -> None:
        qkv, o_proj = (None, None) if shared is None else (shared.qkv, shared.o_proj)
        super().__init__(sizes, qkv=qkv, o_proj=o_proj, **parts.tools)
        self.down = Linear(sizes.hidden, 3 * rank, bias=False, **parts.tools)
        rows = (sizes.q_rows, sizes.kv_rows, sizes.kv_rows)
        self.up = nn.ModuleList(Linear(rank, count, bias=False, **parts.tools) for count in rows)

    def project(self, x: Tensor) -> Tensor:
        """See :class:`Attention`."""
        adapted = [up(low) for up, low in zip(self.up, self.down(x).chunk(3, dim=-1), strict=True)]
        return super().project(x) + torch.cat(adapted, dim=-1)


class AdaptedMLP(nn.Module):
    """A shared MLP with an adapter of one call for its gate and up rows."""

    def __init__(self, shared: GatedMLP, hidden: int, inner: int, rank: int, parts: Build) -> None:
        super().__init__()
        self.shared = shared
        self.down = Linear(hidden, rank, bias=False, **parts.tools)
        self.up = Linear(rank, 2 * inner, bias=False, **parts.tools)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = (self.shared.w_in(x) + self.up(self.down(x))).chunk(2, dim=-1)
        out: Tensor = self.shared.w_out(self.shared.act(gate) * up)
        return out


class AdaptedCall(SharedCall):
    """A call with adapters; the first of a block has its weights, the others share them."""

    def __init__(
        self, config: ModelConfig, sizes: Zamba2Sizes, first: AdaptedCall | None, parts: Build
    ) -> None:
        tools, width, eps = parts.tools, config.hidden_size, config.norm_eps
        norms: tuple[nn.Module, nn.Module]
        if first is None:
            norms = (RMSNorm(2 * width, eps, **tools), RMSNorm(width, eps, **tools))
            mlp = GatedMLP(width, sizes.inner, activation=sizes.activation, bias=sizes.bias, **tools)
        else:
            norms, mlp = (first.norm, first.mlp_norm), first.shared_mlp
        shared = None if first is None else first.attention
        if sizes.adapts_attention:
            attention: Attention = AdaptedAttention(sizes.attention, sizes.rank, shared, parts)
        else:
            attention = shared or Attention(sizes.attention, **tools)
        adapted = AdaptedMLP(mlp, width, sizes.inner, sizes.rank, parts)
        super().__init__(norms[0], attention, norms[1], adapted, parts.dtypes.act)
        self._shared_mlp = (mlp,)  # in a tuple, so that it isn't registered under a second name

    @property
    def shared_mlp(self) -> GatedMLP:
        """The MLP without the adapters."""
        return self._shared_mlp[0]


def _calls(config: ModelConfig, sizes: Zamba2Sizes, parts: Build) -> list[AdaptedCall]:
    """Every call in order."""
    made: list[AdaptedCall] = []
    for j in range(len(sizes.calls)):
        first = made[j % sizes.num_blocks] if j >= sizes.num_blocks else None
        made.append(AdaptedCall(config, sizes, first, parts))
    return made


def build(config: ModelConfig, parts: Build) -> ZambaLM:
    """Mamba-2 layers, some of which call a shared block."""
    sizes, tools, width, eps = config.sizes, parts.tools, config.hidden_size, config.norm_eps
    assert isinstance(sizes, Zamba2Sizes)
    calls = dict(zip(sizes.calls, _calls(config, sizes, parts), strict=True))

    def layer(i: int) -> ZambaLayer:
        made = ZambaLayer(RMSNorm(width, eps, **tools), MambaMixer2(sizes.mamba, **tools), parts.dtypes.act)
        return made.call(calls[i], Linear(width, width, bias=False, **tools)) if i in calls else made

    return ZambaLM(config, map(layer, range(config.num_layers)), parts)


def _block_entries(sizes: Zamba2Sizes, stored: str, target: str) -> Iterator[Entry]:
    """What all calls of a block share."""
    yield Entry(f"{stored}.input_layernorm.weight", f"{target}.norm.weight", draw=draw_ones)
    yield Entry(f"{stored}.pre_ff_layernorm.weight", f"{target}.mlp_norm.weight", draw=draw_ones)
    yield from attention_entries(sizes.attention, f"{stored}.self_attn", f"{target}.attention")
    for name, own in (("gate_up_proj", "w_in"), ("down_proj", "w_out")):
        yield Entry(f"{stored}.feed_forward.{name}.weight", f"{target}.mlp.shared.{own}.weight")
        yield Entry(f"{stored}.feed_forward.{name}.bias", f"{target}.mlp.shared.{own}.bias", draw=draw_zeros)


def _adapter_entries(rank: int, j: int, stored: str, target: str) -> Iterator[Entry]:
    """The adapters of call ``j``, which a checkpoint keeps in its block."""
    for part, letter in enumerate("qkv"):
        name = f"{stored}.self_attn.linear_{letter}_adapter_list.{j}"
        yield Entry(f"{name}.0.weight", f"{target}.attention.down.weight", part=Rows(part * rank, rank))
        yield Entry(f"{name}.1.weight", f"{target}.attention.up.{part}.weight")
    name = f"{stored}.feed_forward.gate_up_proj_adapter_list.{j}"
    yield Entry(f"{name}.0.weight", f"{target}.mlp.down.weight")
    yield Entry(f"{name}.1.weight", f"{target}.mlp.up.weight")


def entries(config: ModelConfig) -> Map:
    """As transformers stores it: each block, with all its adapters, under the first layer that calls it."""
    sizes = config.sizes
    assert isinstance(sizes, Zamba2Sizes)
    found = [
        *outer_entries(norm="model.final_layernorm.weight"),
        *layer_entries(sizes.calls, config.num_layers, mamba2_entries),
    ]
    for j, layer in enumerate(sizes.calls):
        first = sizes.calls[j % sizes.num_blocks]
        stored, target = f"model.layers.{first}.shared_transformer", f"layers.{layer}.shared"
        if layer == first:
            found += _block_entries(sizes, stored, target)
        found += _adapter_entries(sizes.rank, j, stored, target)
    return tuple(found)


ZAMBA2 = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=True,
    handles=frozenset({"hidden_act"}),
)
