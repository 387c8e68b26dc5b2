"""Qwen3.5 (text): Qwen3-Next's layers with an MLP each, or experts in all of them; projections are stored one by one.

Checkpoints that also see hold the language model below ``model.language_model``, its numbers in ``text_config``; a text has
the same position in all three of its axes, so that its rotary positions are plain ones.
"""

from __future__ import annotations

from recurra.layers.mlp import ACTIVATIONS
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Family
from recurra.models.hybrid import TIED
from recurra.models.maps import side_by_side
from recurra.models.qwen3_next import (
    QwenSizes,
    build,
    read_attention,
    read_delta,
    read_experts,
    read_kinds,
    shared_entries,
)
from recurra.models.weights import Map


def read(fields: Fields) -> QwenSizes:
    """Numbers from transformers' ``Qwen3_5TextConfig``."""
    kinds = read_kinds(fields)
    return QwenSizes(
        attends=kinds,
        sparse=(False,) * len(kinds),
        attention=read_attention(fields, kv_heads=4),
        delta=read_delta(fields),
        experts=None,
        inner=fields.whole("intermediate_size", 12288),
        shared_inner=0,
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def read_moe(fields: Fields) -> QwenSizes:
    """Numbers from transformers' ``Qwen3_5MoeTextConfig``."""
    kinds = read_kinds(fields)
    return QwenSizes(
        attends=kinds,
        sparse=(True,) * len(kinds),
        attention=read_attention(fields),
        delta=read_delta(fields),
        experts=read_experts(fields, renormalise=True, top_k=8, count=256),
        inner=0,
        shared_inner=fields.whole("shared_expert_intermediate_size", 512),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def entries(config: ModelConfig) -> Map:
    """As transformers stores it, or the language model's part of it."""
    sizes = config.sizes
    assert isinstance(sizes, QwenSizes)
    d = sizes.delta
    names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
    rows = (d.conv_channels, d.values, d.value_heads, d.value_heads)
    return (
        *shared_entries(sizes),
        *side_by_side(
            "model.layers.{i}.linear_attn", "layers.{i}.mixer.in_proj.weight", zip(names, rows, strict=True)
        ),
    )


_RENAMES = ((r"^(model\.)?language_model\.(model\.)?", "model."),)
_SKIPS = (r"mtp\.", r"(model\.)?visual\.")

QWEN3_5 = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act"}),
    section="text_config",
    renames=_RENAMES,
    skips=_SKIPS,
)
QWEN3_5_MOE = Family(
    read={Layout.TRANSFORMERS: read_moe},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act", "num_experts"}),
    section="text_config",
    renames=_RENAMES,
    skips=_SKIPS,
)
