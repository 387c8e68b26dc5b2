"""Bamba: Mamba-2 layers with a few attention layers among them, each followed by a gated MLP."""

from __future__ import annotations

from dataclasses import dataclass

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import attention_entries, gated_mlp_entries, mamba2_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, draw_ones


@dataclass(frozen=True, slots=True)
class BambaSizes:
    """``attention_layers``: numbers of the layers that attend; the others are Mamba-2."""

    attention_layers: frozenset[int]
    attention: AttentionSizes
    mamba: Mamba2Sizes
    inner: int
    mlp_bias: bool
    activation: str


def read(fields: Fields) -> BambaSizes:
    """Numbers from transformers' ``BambaConfig``."""
    return BambaSizes(
        attention_layers=frozenset(fields.ids("attn_layer_indices")),
        attention=_read_attention(fields),
        mamba=read_mamba(fields),
        inner=fields.whole("intermediate_size"),
        mlp_bias=fields.flag("mlp_bias", False),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _read_attention(fields: Fields) -> AttentionSizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", 32)
    head_dim = fields.whole("head_dim", hidden // heads)
    bias = fields.flag("attention_bias", False)
    return AttentionSizes(
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        out_bias=bias,
        rotary=read_rotary(fields, head_dim, partial=0.5),
    )


def read_mamba(fields: Fields, inner: int | None = None, out_bias: bool | None = None) -> Mamba2Sizes:
    """The Mamba-2 layers of Bamba and its relatives.

    Args:
        inner: channels; None: ``mamba_expand`` times the width.
        out_bias: of the output projection; None: like the input projection's.

    Raises:
        CheckpointError: heads that don't divide the channels, or a head dimension that disagrees.
    """
    heads, hidden = fields.whole("mamba_n_heads", 128), fields.whole("hidden_size")
    inner = inner or fields.whole("mamba_expand", 2) * hidden
    if inner % heads or fields.raw.get("mamba_d_head", "auto") not in ("auto", None, inner // heads):
        raise fields.wrong("mamba_n_heads", f"heads times mamba_d_head must be {inner}.")
    bias = fields.flag("mamba_proj_bias", False)
    return Mamba2Sizes(
        hidden=hidden,
        num_heads=heads,
        head_dim=inner // heads,
        num_groups=fields.whole("mamba_n_groups", 1),
        state_size=fields.whole("mamba_d_state", 256),
        conv_kernel=fields.whole("mamba_d_conv", 4, least=2),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        use_bias=bias,
        out_bias=bias if out_bias is None else out_bias,
        use_conv_bias=fields.flag("mamba_conv_bias", True),
        dt_limit=fields.interval("time_step_limit"),
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then an MLP, each behind a norm."""
    sizes, tools = config.sizes, parts.tools
    assert isinstance(sizes, BambaSizes)

    def block(i: int) -> Block:
        attends = i in sizes.attention_layers
        return Block(
            parts.dtypes.act,
            norm=RMSNorm(config.hidden_size, config.norm_eps, **tools),
            mixer=Attention(sizes.attention, **tools) if attends else MambaMixer2(sizes.mamba, **tools),
            mlp_norm=RMSNorm(config.hidden_size, config.norm_eps, **tools),
            mlp=GatedMLP(
                config.hidden_size, sizes.inner, activation=sizes.activation, bias=sizes.mlp_bias, **tools
            ),
        )

    return HybridLM(config, map(block, range(config.num_layers)), parts)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it."""
    sizes = config.sizes
    assert isinstance(sizes, BambaSizes)
    layer = "model.layers.{i}"
    return (
        *outer_entries(norm="model.final_layernorm.weight"),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        *mamba2_entries(f"{layer}.mamba", "layers.{i}.mixer"),
        *attention_entries(sizes.attention, f"{layer}.self_attn", "layers.{i}.mixer"),
        *gated_mlp_entries(sizes.inner, f"{layer}.feed_forward", "layers.{i}.mlp"),
    )


BAMBA = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"attn_layer_indices", "hidden_act"}),
)
