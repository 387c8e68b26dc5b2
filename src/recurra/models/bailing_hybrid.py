"""Ling (BailingHybrid): Kimi delta attention with bounded decay, latent attention with gates, and many experts.

One layer in a group attends, the others are Kimi delta attention; the first layers have an MLP, the later ones experts
chosen by sigmoid scores within the best groups, beside one that all tokens pass. The layers are Kimi Linear's
(:mod:`recurra.models.kimi_linear`), with other numbers and names. Source: Ling (Ant Group, 2025).
"""

from __future__ import annotations

import math

from recurra.layers.delta import DeltaSizes
from recurra.layers.latent import LatentSizes
from recurra.layers.mlp import ACTIVATIONS
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Family
from recurra.models.hybrid import TIED, outer_entries
from recurra.models.kimi_linear import KimiSizes, adapt, build, read_experts
from recurra.models.maps import (
    delta_entries,
    expert_entries,
    gated_mlp_entries,
    latent_entries,
    side_by_side,
)
from recurra.models.qwen3_next import KINDS
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, draw_ones, draw_zeros

#: Of the norms inside latent attention, whatever the configuration says of the others.
_LATENT_EPS = 1e-6


def read(fields: Fields) -> KimiSizes:
    """Numbers from transformers' ``BailingHybridConfig``.

    Raises:
        CheckpointError: heads that share keys.
    """
    heads, layers = fields.whole("num_attention_heads"), fields.whole("num_hidden_layers")
    fields.only({"num_key_value_heads": (heads,)})
    group, dense = fields.whole("layer_group_size", 6), fields.whole("first_k_dense_replace", 2, least=0)
    kinds = fields.raw.get("layer_types"), fields.raw.get("mlp_layer_types")
    experts = read_experts(fields, inner=768, num_experts=512, scale=2.5, groups=8, groups_kept=4)
    return KimiSizes(
        attends=tuple((i + 1) % group == 0 for i in range(layers))
        if kinds[0] is None
        else tuple(KINDS[kind] for kind in fields.choices("layer_types", KINDS, layers)),
        sparse=tuple(i >= dense for i in range(layers))
        if kinds[1] is None
        else tuple(k == "sparse" for k in fields.choices("mlp_layer_types", ("dense", "sparse"), layers)),
        attention=_read_attention(fields, heads),
        delta=_read_delta(fields, heads),
        experts=experts,
        inner=fields.whole("intermediate_size"),
        shared_inner=experts.inner * fields.whole("n_shared_experts", 1),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _read_attention(fields: Fields, heads: int) -> LatentSizes:
    own, shared = fields.whole("qk_nope_head_dim", 128), fields.whole("qk_rope_head_dim", 64)
    return LatentSizes(
        hidden=fields.whole("hidden_size"),
        num_heads=heads,
        own_dim=own,
        shared_dim=shared,
        value_dim=fields.whole("v_head_dim", 128),
        rank=fields.whole("kv_lora_rank", 512),
        scale=(own + shared) ** -0.5 * _stretch(fields),
        norm_eps=_LATENT_EPS,
        query_rank=0 if fields.raw.get("q_lora_rank") is None else fields.whole("q_lora_rank"),
        bias=fields.flag("attention_bias", False),
        rotary=read_rotary(fields, shared, theta=6e6, interleaved=True),
        gated=True,
    )


def _stretch(fields: Fields) -> float:
    """What stretched positions do to the scores (YaRN's factor, squared)."""
    how = fields.section("rope_parameters")
    weight = how.number("mscale_all_dim", 0.0)
    if how.raw.get("rope_type", "default") == "default" or not weight:
        return 1.0
    factor = how.number("factor", 1.0)
    return 1.0 if factor <= 1 else (0.1 * weight * math.log(factor) + 1.0) ** 2


def _read_delta(fields: Fields, heads: int) -> DeltaSizes:
    dim = fields.whole("linear_head_dim", fields.whole("head_dim", 128))
    safe = fields.flag("kda_safe_gate", True)
    return DeltaSizes(
        hidden=fields.whole("hidden_size"),
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_kernel=fields.whole("short_conv_kernel_size", 4, least=2),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        decay_bound=fields.number("kda_lower_bound", -5.0) if safe else None,
    )


def entries(config: ModelConfig) -> Map:
    """As transformers names it; the published names become these (see :data:`BAILING_HYBRID`)."""
    sizes = config.sizes
    assert isinstance(sizes, KimiSizes)
    layer, mixer, mlp = "model.layers.{i}", "layers.{i}.mixer", "layers.{i}.mlp"
    names = ("q_proj", "k_proj", "v_proj", "f_proj", "g_proj", "b_proj")
    d = sizes.delta
    rows = (d.keys, d.keys, d.values, d.keys, d.values, d.value_heads)
    return (
        *outer_entries(),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        *side_by_side(f"{layer}.self_attn", f"{mixer}.in_proj.weight", zip(names, rows, strict=True)),
        *delta_entries(d, f"{layer}.self_attn", mixer, norm="o_norm", out="o_proj"),
        *latent_entries(sizes.attention, f"{layer}.self_attn", mixer),
        *gated_mlp_entries(sizes.inner, f"{layer}.mlp", mlp),
        Entry(f"{layer}.mlp.gate.weight", f"{mlp}.router"),
        Entry(f"{layer}.mlp.gate.e_score_correction_bias", f"{mlp}.router_bias", draw=draw_zeros),
        *expert_entries(f"{layer}.mlp.experts", mlp, sizes.experts.inner),
        *gated_mlp_entries(sizes.shared_inner, f"{layer}.mlp.shared_experts", f"{mlp}.shared"),
    )


BAILING_HYBRID = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act", "num_experts"}),
    adapt=adapt,
    renames=(
        (r"^model\.word_embeddings\.", "model.embed_tokens."),
        (r"\.attention\.", ".self_attn."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.self_attn\.forget_gate\.", ".self_attn."),
        (r"\.mlp\.gate\.expert_bias", ".mlp.gate.e_score_correction_bias"),
    ),
)
