"""Jamba: Mamba layers with norms of B, C and dt, attention without positions, and experts in every other layer.

Source: Jamba (Lieber et al., 2024), section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.mamba1 import Mamba1Sizes, MambaMixer
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.moe import MoE, MoESizes, Routing
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import attention_entries, expert_entries, gated_mlp_entries, mamba1_entries
from recurra.models.weights import Entry, Map, draw_ones


@dataclass(frozen=True, slots=True)
class JambaSizes:
    """``attention_layers``, ``expert_layers``: numbers of the layers that attend, and of those with experts."""

    attention_layers: frozenset[int]
    expert_layers: frozenset[int]
    attention: AttentionSizes
    mamba: Mamba1Sizes
    experts: MoESizes


def read(fields: Fields) -> JambaSizes:
    """Numbers from transformers' ``JambaConfig``."""
    activation = fields.choice("hidden_act", ACTIVATIONS, "silu")
    if activation not in ("silu", "swish"):  # the mixer's convolution has the same
        raise fields.wrong("hidden_act", "not supported; it works with 'silu'.")
    num_experts = fields.whole("num_experts", 16)
    return JambaSizes(
        attention_layers=_every(fields, "attn_layer", 8, 4),
        expert_layers=_every(fields, "expert_layer", 2, 1) if num_experts > 1 else frozenset(),
        attention=_read_attention(fields),
        mamba=_read_mamba(fields),
        experts=MoESizes(
            hidden=fields.whole("hidden_size"),
            inner=fields.whole("intermediate_size"),
            num_experts=num_experts,
            routing=Routing(fields.whole("num_experts_per_tok", 2)),
            activation=activation,
        ),
    )


def _every(fields: Fields, key: str, period: int, offset: int) -> frozenset[int]:
    """Layers whose number is ``offset`` beyond a multiple of ``period``."""
    period, offset = fields.whole(f"{key}_period", period), fields.whole(f"{key}_offset", offset, least=0)
    if offset >= period:
        raise fields.wrong(f"{key}_offset", f"must be below {key}_period, {period}.")
    return frozenset(range(offset, fields.whole("num_hidden_layers"), period))


def _read_attention(fields: Fields) -> AttentionSizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", 32)
    head_dim = fields.whole("head_dim", hidden // heads)
    return AttentionSizes(
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
    )


def _read_mamba(fields: Fields) -> Mamba1Sizes:
    hidden, rank = fields.whole("hidden_size"), fields.raw.get("mamba_dt_rank", "auto")
    return Mamba1Sizes(
        hidden=hidden,
        channels=fields.whole("mamba_expand", 2) * hidden,
        state_size=fields.whole("mamba_d_state", 16),
        conv_kernel=fields.whole("mamba_d_conv", 4, least=2),
        dt_rank=math.ceil(hidden / 16) if rank == "auto" else fields.whole("mamba_dt_rank"),
        use_bias=fields.flag("mamba_proj_bias", False),
        use_conv_bias=fields.flag("mamba_conv_bias", True),
        bcdt_norm_eps=fields.number("rms_norm_eps", 1e-6),
        bcdt_norm_weights=True,
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then an MLP or experts, each behind a norm."""
    sizes, tools, width = config.sizes, parts.tools, config.hidden_size
    assert isinstance(sizes, JambaSizes)
    experts = sizes.experts

    def mixer(i: int) -> nn.Module:
        attends = i in sizes.attention_layers
        return Attention(sizes.attention, **tools) if attends else MambaMixer(sizes.mamba, **tools)

    def mlp(i: int) -> nn.Module:
        if i in sizes.expert_layers:
            return MoE(experts, **tools)
        return GatedMLP(width, experts.inner, activation=experts.activation, bias=False, **tools)

    def block(i: int) -> Block:
        norms = [RMSNorm(width, config.norm_eps, **tools) for _ in range(2)]
        return Block(parts.dtypes.act, norm=norms[0], mixer=mixer(i), mlp_norm=norms[1], mlp=mlp(i))

    return HybridLM(config, map(block, range(config.num_layers)), parts)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it."""
    sizes = config.sizes
    assert isinstance(sizes, JambaSizes)
    layer, inner = "model.layers.{i}", sizes.experts.inner
    return (
        *outer_entries(norm="model.final_layernorm.weight"),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        *mamba1_entries(f"{layer}.mamba", "layers.{i}.mixer"),
        *attention_entries(sizes.attention, f"{layer}.self_attn", "layers.{i}.mixer"),
        *gated_mlp_entries(inner, f"{layer}.feed_forward", "layers.{i}.mlp"),
        Entry(f"{layer}.feed_forward.router.weight", "layers.{i}.mlp.router"),
        *expert_entries(f"{layer}.feed_forward.experts", "layers.{i}.mlp", inner),
    )


JAMBA = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act", "num_experts"}),
)
