"""LFM2 and its mixture of experts: gated short convolutions with a few attention layers among them."""

from __future__ import annotations

from dataclasses import dataclass

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.mlp import GatedMLP
from recurra.layers.moe import MoE, MoESizes, Routing
from recurra.layers.norm import RMSNorm
from recurra.layers.short_conv import ShortConv, ShortConvSizes
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import Block, HybridLM, outer_entries
from recurra.models.maps import attention_entries, gated_mlp_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Either, Entry, Map, Rows, draw_ones, draw_zeros, filters

_KINDS = ("conv", "full_attention")
_TIED = ("lm_head.weight", "model.embed_tokens.weight")


@dataclass(frozen=True, slots=True)
class Lfm2Sizes:
    """``attends`` says of each layer whether it does; layers from ``num_dense`` on have experts if there are any."""

    attends: tuple[bool, ...]
    attention: AttentionSizes
    conv: ShortConvSizes
    inner: int
    num_dense: int
    experts: MoESizes | None


def _read(fields: Fields, inner: int, num_dense: int, experts: MoESizes | None) -> Lfm2Sizes:
    hidden, heads, layers = (
        fields.whole(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers")
    )
    head_dim = fields.whole("head_dim", hidden // heads)
    eps = fields.number("norm_eps", 1e-5)
    return Lfm2Sizes(
        attends=_attends(fields, layers),
        attention=AttentionSizes(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=fields.whole("num_key_value_heads", heads),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            rotary=read_rotary(fields, head_dim, theta=1e6),
            norm_eps=eps,
        ),
        conv=ShortConvSizes(
            hidden, fields.whole("conv_L_cache", 3, least=2), fields.flag("conv_bias", False)
        ),
        inner=inner,
        num_dense=num_dense,
        experts=experts,
    )


def _attends(fields: Fields, layers: int) -> tuple[bool, ...]:
    """By ``layer_types``, or by ``full_attn_idxs`` in older files."""
    if fields.raw.get("layer_types") is not None:
        return tuple(kind == "full_attention" for kind in fields.choices("layer_types", _KINDS, layers))
    attending = fields.ids("full_attn_idxs") if "full_attn_idxs" in fields.raw else range(layers)
    return tuple(i in attending for i in range(layers))


def read(fields: Fields) -> Lfm2Sizes:
    """Numbers from transformers' ``Lfm2Config``; its ``intermediate_size`` may be an estimate to be adjusted."""
    inner = fields.whole("block_ff_dim" if "block_ff_dim" in fields.raw else "intermediate_size")
    if fields.flag("block_auto_adjust_ff_dim", True):
        inner = int(2 * inner / 3)
        if fields.raw.get("block_ffn_dim_multiplier", 1.0) is not None:
            multiple = fields.whole("block_multiple_of", 256)
            inner = -(-int(fields.number("block_ffn_dim_multiplier", 1.0) * inner) // multiple) * multiple
    return _read(fields, inner, fields.whole("num_hidden_layers"), None)


def read_moe(fields: Fields) -> Lfm2Sizes:
    """Numbers from transformers' ``Lfm2MoeConfig``."""
    experts = MoESizes(
        hidden=fields.whole("hidden_size"),
        inner=fields.whole("moe_intermediate_size"),
        num_experts=fields.whole("num_experts"),
        routing=Routing(
            top_k=fields.whole("num_experts_per_tok", 4),
            score="sigmoid",
            renormalise=fields.flag("norm_topk_prob", True),
            eps=1e-6,
            scale=fields.number("routed_scaling_factor", 1.0),
        ),
        has_bias=fields.flag("use_expert_bias", True),
    )
    return _read(
        fields, fields.whole("intermediate_size"), fields.whole("num_dense_layers", 2, least=0), experts
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then an MLP or experts, each behind a norm."""
    sizes, tools = config.sizes, parts.tools
    assert isinstance(sizes, Lfm2Sizes)

    def block(i: int) -> Block:
        dense = sizes.experts is None or i < sizes.num_dense
        return Block(
            parts.dtypes.act,
            norm=RMSNorm(config.hidden_size, config.norm_eps, **tools),
            mixer=Attention(sizes.attention, **tools) if sizes.attends[i] else ShortConv(sizes.conv, **tools),
            mlp_norm=RMSNorm(config.hidden_size, config.norm_eps, **tools),
            mlp=GatedMLP(config.hidden_size, sizes.inner, activation="silu", bias=False, **tools)
            if dense or sizes.experts is None
            else MoE(sizes.experts, **tools),
        )

    return HybridLM(config, map(block, range(config.num_layers)), parts)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it."""
    sizes = config.sizes
    assert isinstance(sizes, Lfm2Sizes)
    layer = "model.layers.{i}"
    return (
        *outer_entries(norm="model.embedding_norm.weight"),
        Entry(f"{layer}.operator_norm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.ffn_norm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        Entry(f"{layer}.conv.in_proj.weight", "layers.{i}.mixer.in_proj.weight"),
        Entry(f"{layer}.conv.in_proj.bias", "layers.{i}.mixer.in_proj.bias", draw=draw_zeros),
        Entry(f"{layer}.conv.conv.weight", "layers.{i}.mixer.conv1d.weight", filters),
        Entry(f"{layer}.conv.conv.bias", "layers.{i}.mixer.conv1d.bias", draw=draw_zeros),
        Entry(f"{layer}.conv.out_proj.weight", "layers.{i}.mixer.out_proj.weight"),
        Entry(f"{layer}.conv.out_proj.bias", "layers.{i}.mixer.out_proj.bias", draw=draw_zeros),
        *attention_entries(
            sizes.attention, f"{layer}.self_attn", "layers.{i}.mixer", out="out_proj",
            norms=("q_layernorm", "k_layernorm"),
        ),
        *gated_mlp_entries(sizes.inner, f"{layer}.feed_forward", "layers.{i}.mlp", ("w1", "w3", "w2")),
        *(_experts(sizes.experts) if sizes.experts is not None else ()),
    )  # fmt: skip


def _experts(sizes: MoESizes) -> Map:
    """One by one as published, or stacked."""
    stored, target, inner = "model.layers.{i}.feed_forward", "layers.{i}.mlp", sizes.inner
    alone = f"{stored}.experts.{{e}}"
    return (
        Entry(f"{stored}.gate.weight", f"{target}.router"),
        Entry(f"{stored}.expert_bias", f"{target}.router_bias", draw=draw_zeros),
        Either((
            (
                Entry(f"{alone}.w1.weight", f"{target}.w_in", part=Rows(0, inner)),
                Entry(f"{alone}.w3.weight", f"{target}.w_in", part=Rows(inner, inner)),
                Entry(f"{alone}.w2.weight", f"{target}.w_out"),
            ),
            (
                Entry(f"{stored}.experts.gate_up_proj", f"{target}.w_in"),
                Entry(f"{stored}.experts.down_proj", f"{target}.w_out"),
            ),
        )),
    )  # fmt: skip


LFM2 = Family(read={Layout.TRANSFORMERS: read}, build=build, entries=entries, tied=_TIED, tied_default=True)
LFM2_MOE = Family(
    read={Layout.TRANSFORMERS: read_moe},
    build=build,
    entries=entries,
    tied=_TIED,
    tied_default=True,
    handles=frozenset({"num_experts"}),
)
