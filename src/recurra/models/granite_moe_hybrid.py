"""Granite 4: Mamba-2 and a few attention layers, each followed by experts beside an MLP that all tokens pass.

The embedding, the residual branches, the attention's scores and the logits have multipliers of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.layers.mlp import GatedMLP
from recurra.layers.moe import MoE, MoESizes, Routing
from recurra.layers.norm import RMSNorm
from recurra.models.bamba import read_mamba
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import attention_entries, mamba2_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, draw_ones

#: Kinds of layers; newer files have the longer words.
KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}


@dataclass(frozen=True, slots=True)
class GraniteSizes:
    """Numbers of all layers.

    Attributes:
        attends: for each layer, whether it attends.
        experts: None: an MLP alone.
        inner: of the MLP that all tokens pass.
        embedding, residual, logits: multipliers.
    """

    attends: tuple[bool, ...]
    attention: AttentionSizes
    mamba: Mamba2Sizes
    experts: MoESizes | None
    inner: int
    embedding: float
    residual: float
    logits: float


def read(fields: Fields) -> GraniteSizes:
    """Numbers from transformers' ``GraniteMoeHybridConfig``."""
    layers = fields.whole("num_hidden_layers")
    key = "layer_types" if fields.raw.get("layer_types") else "layers_block_type"
    kinds = fields.choices(key, KINDS, layers) if fields.raw.get(key) else ("mamba",) * layers
    fields.only({"hidden_act": ("silu", "swish")})
    return GraniteSizes(
        attends=tuple(KINDS[kind] for kind in kinds),
        attention=_read_attention(fields),
        mamba=read_mamba(fields),
        experts=_read_experts(fields),
        inner=fields.whole("shared_intermediate_size", 1024),
        embedding=fields.number("embedding_multiplier", 1.0),
        residual=fields.number("residual_multiplier", 1.0),
        logits=1.0 / fields.number("logits_scaling", 1.0),
    )


def _read_attention(fields: Fields) -> AttentionSizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", 32)
    head_dim = fields.whole("head_dim", hidden // heads)
    bias = fields.flag("attention_bias", False)
    turns = fields.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    return AttentionSizes(
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=heads
        if fields.raw.get("num_key_value_heads") is None
        else fields.whole("num_key_value_heads"),
        head_dim=head_dim,
        scale=fields.number("attention_multiplier", 1.0),
        bias=bias,
        out_bias=bias,
        rotary=read_rotary(fields, head_dim) if turns else None,
    )


def _read_experts(fields: Fields) -> MoESizes | None:
    count = fields.whole("num_local_experts", 8, least=0)
    if count == 0:
        return None
    return MoESizes(
        hidden=fields.whole("hidden_size"),
        inner=fields.whole("intermediate_size"),
        num_experts=count,
        routing=Routing(fields.whole("num_experts_per_tok", 2), score="softmax_chosen"),
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then experts and an MLP side by side, each behind a norm and scaled."""
    sizes, tools, width = config.sizes, parts.tools, config.hidden_size
    assert isinstance(sizes, GraniteSizes)

    def mlp() -> nn.Module:
        shared = GatedMLP(width, sizes.inner, activation="silu", bias=False, **tools)
        return shared if sizes.experts is None else MoE(sizes.experts, shared=shared, **tools)

    def block(attends: bool) -> Block:
        return Block(
            parts.dtypes.act,
            norm=RMSNorm(width, config.norm_eps, **tools),
            mixer=Attention(sizes.attention, **tools) if attends else MambaMixer2(sizes.mamba, **tools),
            mlp_norm=RMSNorm(width, config.norm_eps, **tools),
            mlp=mlp(),
            scale=sizes.residual,
        )

    return HybridLM(
        config, map(block, sizes.attends), parts, embedding_scale=sizes.embedding, logits_scale=sizes.logits
    )


def entries(config: ModelConfig) -> Map:
    """As transformers stores it."""
    sizes = config.sizes
    assert isinstance(sizes, GraniteSizes)
    layer = "model.layers.{i}"
    shared = "layers.{i}.mlp" if sizes.experts is None else "layers.{i}.mlp.shared"
    return (
        *outer_entries(),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        *mamba2_entries(f"{layer}.mamba", "layers.{i}.mixer"),
        *attention_entries(sizes.attention, f"{layer}.self_attn", "layers.{i}.mixer"),
        Entry(f"{layer}.shared_mlp.input_linear.weight", f"{shared}.w_in.weight"),
        Entry(f"{layer}.shared_mlp.output_linear.weight", f"{shared}.w_out.weight"),
        Entry(f"{layer}.block_sparse_moe.router.layer.weight", "layers.{i}.mlp.router"),
        Entry(f"{layer}.block_sparse_moe.input_linear.weight", "layers.{i}.mlp.w_in"),
        Entry(f"{layer}.block_sparse_moe.output_linear.weight", "layers.{i}.mlp.w_out"),
    )


GRANITE_MOE_HYBRID = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"embedding_multiplier", "residual_multiplier", "logits_scaling"}),
    renames=(
        (r"block_sparse_moe\.experts\.gate_up_proj$", "block_sparse_moe.input_linear.weight"),
        (r"block_sparse_moe\.experts\.down_proj$", "block_sparse_moe.output_linear.weight"),
        (r"block_sparse_moe\.router\.weight$", "block_sparse_moe.router.layer.weight"),
    ),
)
