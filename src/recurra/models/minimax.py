"""MiniMax-Text-01 and M1: lightning attention with softmax attention in between, experts in every layer.

The residual stream passes the norm: what a mixer or the experts give is added to their own input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.cache.spec import LayerState
from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.base import mix
from recurra.layers.lightning import LightningAttention, LightningSizes
from recurra.layers.mlp import ACTIVATIONS
from recurra.layers.moe import MoE, MoESizes, Routing
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, HybridLM, outer_entries
from recurra.models.maps import at, attention_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Either, Entry, Map, Rows, draw_ones
from recurra.types import ForwardBatch

_KINDS = ("full_attention", "linear_attention")


@dataclass(frozen=True, slots=True)
class Blend:
    """``input * alpha + output * beta``, around each part of a layer."""

    alpha: float
    beta: float


@dataclass(frozen=True, slots=True)
class MiniMaxSizes:
    """``attends``: which layers use softmax attention; the blends are around the three parts."""

    attends: tuple[bool, ...]
    attention: AttentionSizes
    activation: str
    experts: MoESizes
    full: Blend
    linear: Blend
    mlp: Blend

    def lightning(self, layer: int) -> LightningSizes:
        """A linear layer's numbers: later layers decay more slowly."""
        heads, layers = self.attention.num_heads, len(self.attends)
        factor = 1 - layer / (layers - 1 + 1e-5) + 1e-5
        return LightningSizes(
            hidden=self.attention.hidden,
            num_heads=heads,
            head_dim=self.attention.head_dim,
            log_decay=tuple(-(2.0 ** (-8 * (h + 1) / heads)) * factor for h in range(heads)),
            activation=self.activation,
        )


def read(fields: Fields) -> MiniMaxSizes:
    """Numbers from transformers' ``MiniMaxConfig``."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    head_dim = fields.whole("head_dim", hidden // heads) if fields.raw.get("head_dim") else hidden // heads
    activation = fields.choice("hidden_act", ACTIVATIONS, "silu")
    if fields.raw.get("layer_types") is None:
        attends = tuple(i % 2 == 0 for i in range(layers))
    else:
        attends = tuple(k == "full_attention" for k in fields.choices("layer_types", _KINDS, layers))
    window = fields.whole("sliding_window") if fields.raw.get("sliding_window") else 0
    return MiniMaxSizes(
        attends=attends,
        attention=AttentionSizes(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary=read_rotary(fields, head_dim, theta=1e6),
            window=window,
        ),
        activation=activation,
        experts=MoESizes(
            hidden=hidden,
            inner=fields.whole("intermediate_size"),
            num_experts=fields.whole("num_local_experts"),
            routing=Routing(fields.whole("num_experts_per_tok", 2), renormalise=True),
            activation=activation,
        ),
        full=_blend(fields, "full_attn"),
        linear=_blend(fields, "linear_attn"),
        mlp=_blend(fields, "mlp"),
    )


def _blend(fields: Fields, part: str) -> Blend:
    return Blend(fields.number(f"{part}_alpha_factor", 1.0), fields.number(f"{part}_beta_factor", 1.0))


class MiniMaxLayer(nn.Module):
    """``x = norm(x); x = alpha x + beta mixer(x)``, then the same with the experts (see :class:`Layer`)."""

    def __init__(
        self, norms: tuple[nn.Module, nn.Module], mixer: nn.Module, mlp: nn.Module, blends: tuple[Blend, Blend],
        act: torch.dtype,
    ) -> None:  # fmt: skip
        super().__init__()
        self.norm, self.mlp_norm = norms
        self.mixer, self.mlp = mixer, mlp
        self._blends, self._act = blends, act
        self.mixers = (mixer,)

    def forward(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        x = self.norm(x)
        x = self._blend(x, mix(self.mixers[0], x.to(self._act), batch, states[0]), 0)  # type: ignore[arg-type]
        x = self.mlp_norm(x)
        return self._blend(x, self.mlp(x.to(self._act)), 1)

    def _blend(self, x: Tensor, y: Tensor, part: int) -> Tensor:
        return x * self._blends[part].alpha + y * self._blends[part].beta


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then experts."""
    sizes, tools = config.sizes, parts.tools
    assert isinstance(sizes, MiniMaxSizes)

    def layer(i: int) -> MiniMaxLayer:
        attends = sizes.attends[i]
        return MiniMaxLayer(
            (
                RMSNorm(config.hidden_size, config.norm_eps, **tools),
                RMSNorm(config.hidden_size, config.norm_eps, **tools),
            ),
            Attention(sizes.attention, **tools)
            if attends
            else LightningAttention(sizes.lightning(i), **tools),
            MoE(sizes.experts, **tools),
            (sizes.full if attends else sizes.linear, sizes.mlp),
            parts.dtypes.act,
        )

    return HybridLM(config, map(layer, range(config.num_layers)), parts)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it."""
    sizes = config.sizes
    assert isinstance(sizes, MiniMaxSizes)
    layer, inner = "model.layers.{i}", sizes.experts.inner
    linear = [i for i, attends in enumerate(sizes.attends) if not attends]
    experts = f"{layer}.block_sparse_moe"
    alone = f"{experts}.experts.{{e}}"
    return (
        *outer_entries(),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        *at(
            linear,
            (
                Entry(f"{layer}.self_attn.qkv_proj.weight", "layers.{i}.mixer.qkv.weight"),
                Entry(f"{layer}.self_attn.output_gate.weight", "layers.{i}.mixer.gate.weight"),
                Entry(f"{layer}.self_attn.norm.weight", "layers.{i}.mixer.norm.weight", draw=draw_ones),
                Entry(f"{layer}.self_attn.out_proj.weight", "layers.{i}.mixer.out_proj.weight"),
            ),
        ),
        *at(
            [i for i, attends in enumerate(sizes.attends) if attends],
            attention_entries(sizes.attention, f"{layer}.self_attn", "layers.{i}.mixer"),
        ),
        Entry(f"{experts}.gate.weight", "layers.{i}.mlp.router"),
        Either((
            (
                Entry(f"{alone}.w1.weight", "layers.{i}.mlp.w_in", part=Rows(0, inner)),
                Entry(f"{alone}.w3.weight", "layers.{i}.mlp.w_in", part=Rows(inner, inner)),
                Entry(f"{alone}.w2.weight", "layers.{i}.mlp.w_out"),
            ),
            (
                Entry(f"{experts}.experts.gate_up_proj", "layers.{i}.mlp.w_in"),
                Entry(f"{experts}.experts.down_proj", "layers.{i}.mlp.w_out"),
            ),
        )),
    )  # fmt: skip


MINIMAX = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act"}),
    renames=((r"\.mlp\.", ".block_sparse_moe."),),
    skips=(r".*\.self_attn\.(slope_rate|(query|key|diagonal)_decay)$",),  # follow from the layer's number
)
