"""Qwen3-Next: three gated delta nets for each attention layer, whose queries have gates, and experts after all of them.

A projection's rows are stored key head by key head: q, k, and then v and z of the value heads that share it (and
likewise b and a). Norms of the residual stream and of queries and keys multiply by ``1 + weight``. Source: Gated Delta
Networks (Yang et al., 2024); Qwen3-Next (Qwen team, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.delta import DeltaSizes, GatedDeltaNet
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.moe import MoE, MoESizes, Routing
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import Regroup, attention_entries, delta_entries, expert_entries, gated_mlp_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, Rows, draw_ones, one_plus

#: Words for kinds of layers, and whether they attend.
KINDS = {"linear_attention": False, "full_attention": True}


@dataclass(frozen=True, slots=True)
class QwenSizes:
    """Numbers of all layers.

    Attributes:
        attends: for each layer, whether it attends; the others are gated delta nets.
        sparse: for each layer, whether it has experts; the others have an MLP.
        inner: of the MLP, where there is one; ``shared_inner`` of the expert that all tokens pass.
    """

    attends: tuple[bool, ...]
    sparse: tuple[bool, ...]
    attention: AttentionSizes
    delta: DeltaSizes
    experts: MoESizes | None
    inner: int
    shared_inner: int
    activation: str


def read(fields: Fields) -> QwenSizes:
    """Numbers from transformers' ``Qwen3NextConfig``."""
    layers = fields.whole("num_hidden_layers")
    step, dense = fields.whole("decoder_sparse_step", 1), fields.ids("mlp_only_layers")
    experts = read_experts(fields, renormalise=fields.flag("norm_topk_prob", True))
    sparse = tuple(experts is not None and i not in dense and (i + 1) % step == 0 for i in range(layers))
    return QwenSizes(
        attends=read_kinds(fields),
        sparse=sparse,
        attention=read_attention(fields),
        delta=read_delta(fields),
        experts=experts,
        inner=0 if all(sparse) else fields.whole("intermediate_size", 5632),
        shared_inner=fields.whole("shared_expert_intermediate_size", 512) if any(sparse) else 0,
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def read_kinds(fields: Fields) -> tuple[bool, ...]:
    """For each layer whether it attends: ``layer_types``, or every ``full_attention_interval``-th."""
    layers = fields.whole("num_hidden_layers")
    if fields.raw.get("layer_types") is not None:
        return tuple(KINDS[kind] for kind in fields.choices("layer_types", KINDS, layers))
    interval = fields.whole("full_attention_interval", 4)
    return tuple((i + 1) % interval == 0 for i in range(layers))


def read_attention(fields: Fields, kv_heads: int = 2) -> AttentionSizes:
    """Attention with gated queries, queries and keys normed head by head, a quarter of which turns."""
    fields.only({"attn_output_gate": (True,)})
    heads, head_dim = fields.whole("num_attention_heads", 16), fields.whole("head_dim", 256)
    bias = fields.flag("attention_bias", False)
    return AttentionSizes(
        hidden=fields.whole("hidden_size"),
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        out_bias=bias,
        rotary=read_rotary(fields, head_dim, partial=0.25),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        gated=True,
    )


def read_delta(fields: Fields) -> DeltaSizes:
    """The gated delta nets.

    Raises:
        CheckpointError: value heads that are no multiple of the key heads, or another activation than silu.
    """
    fields.only({"hidden_act": ("silu", "swish")})
    key_heads, value_heads = (
        fields.whole("linear_num_key_heads", 16),
        fields.whole("linear_num_value_heads", 32),
    )
    if value_heads % key_heads:
        raise fields.wrong(
            "linear_num_value_heads", f"must be a multiple of linear_num_key_heads={key_heads}."
        )
    return DeltaSizes(
        hidden=fields.whole("hidden_size"),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=fields.whole("linear_key_head_dim", 128),
        value_dim=fields.whole("linear_value_head_dim", 128),
        conv_kernel=fields.whole("linear_conv_kernel_dim", 4, least=2),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
    )


def read_experts(fields: Fields, *, renormalise: bool, top_k: int = 10, count: int = 512) -> MoESizes | None:
    """Experts beside one that all tokens pass, scaled by a gate; None without any."""
    experts = fields.whole("num_experts", count, least=0)
    if experts == 0:
        return None
    return MoESizes(
        hidden=fields.whole("hidden_size"),
        inner=fields.whole("moe_intermediate_size", 512),
        num_experts=experts,
        routing=Routing(fields.whole("num_experts_per_tok", top_k), renormalise=renormalise),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        shared_gated=True,
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then experts or an MLP, each behind a norm."""
    sizes, tools, width = config.sizes, parts.tools, config.hidden_size
    assert isinstance(sizes, QwenSizes)

    def dense(inner: int) -> GatedMLP:
        return GatedMLP(width, inner, activation=sizes.activation, bias=False, **tools)

    def mlp(sparse: bool) -> nn.Module:
        if not sparse:
            return dense(sizes.inner)
        assert sizes.experts is not None
        return MoE(sizes.experts, shared=dense(sizes.shared_inner), **tools)

    def block(attends: bool, sparse: bool) -> Block:
        return Block(
            parts.dtypes.act,
            norm=RMSNorm(width, config.norm_eps, **tools),
            mixer=Attention(sizes.attention, **tools) if attends else GatedDeltaNet(sizes.delta, **tools),
            mlp_norm=RMSNorm(width, config.norm_eps, **tools),
            mlp=mlp(sparse),
        )

    return HybridLM(config, map(block, sizes.attends, sizes.sparse), parts)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it, the delta nets' projections fused."""
    sizes = config.sizes
    assert isinstance(sizes, QwenSizes)
    d, stored, target = sizes.delta, "model.layers.{i}.linear_attn", "layers.{i}.mixer.in_proj.weight"
    shared = d.value_heads // d.key_heads  # heads of v for one of k
    values, wide = shared * d.value_dim, d.conv_channels + d.values
    qkvz = Regroup(d.key_heads, (d.key_dim, d.key_dim, values, values))
    return (
        *shared_entries(sizes),
        Entry(f"{stored}.in_proj_qkvz.weight", target, qkvz, part=Rows(0, wide)),
        Entry(
            f"{stored}.in_proj_ba.weight", target, Regroup(d.key_heads, (shared, shared)),
            part=Rows(wide, 2 * d.value_heads),
        ),
    )  # fmt: skip


def shared_entries(sizes: QwenSizes) -> Map:
    """All but the delta nets' projections of their input."""
    layer, mlp = "model.layers.{i}", "layers.{i}.mlp"
    return (
        *outer_entries(convert=one_plus),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", one_plus, draw_ones),
        Entry(f"{layer}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", one_plus, draw_ones),
        *delta_entries(sizes.delta, f"{layer}.linear_attn", "layers.{i}.mixer"),
        *attention_entries(sizes.attention, f"{layer}.self_attn", "layers.{i}.mixer", norm=one_plus),
        *gated_mlp_entries(sizes.inner, f"{layer}.mlp", mlp),
        Entry(f"{layer}.mlp.gate.weight", f"{mlp}.router"),
        *expert_entries(f"{layer}.mlp.experts", mlp, sizes.experts.inner if sizes.experts else 0),
        *gated_mlp_entries(sizes.shared_inner, f"{layer}.mlp.shared_expert", f"{mlp}.shared"),
        Entry(f"{layer}.mlp.shared_expert_gate.weight", f"{mlp}.shared_gate.weight"),
    )


QWEN3_NEXT = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act", "num_experts"}),
    skips=(r"mtp\.",),
)
