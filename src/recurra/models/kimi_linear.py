"""Kimi Linear: three layers of Kimi delta attention for each of latent attention without positions; experts after most.

Each is followed by experts chosen by sigmoid scores with a bias for the choice, beside experts that all tokens pass; the
first layers have an MLP instead. Source: Kimi Linear (Moonshot AI, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from recurra.layers.delta import DeltaSizes, KimiDeltaAttention
from recurra.layers.latent import LatentAttention, LatentSizes
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.moe import MoE, MoESizes, Routing
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import (
    delta_entries,
    expert_entries,
    gated_mlp_entries,
    latent_entries,
    side_by_side,
)
from recurra.models.qwen3_next import KINDS
from recurra.models.weights import Entry, Map, draw_ones, draw_zeros

#: Of the norms inside latent attention, whatever the configuration says of the others.
_LATENT_EPS = 1e-6

#: The checkpoint's names of settings, and those of transformers' class.
_NAMES = {
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_shared_experts": "n_shared_experts",
    "num_experts": "num_local_experts",
    "model_max_length": "max_position_embeddings",
}


@dataclass(frozen=True, slots=True)
class KimiSizes:
    """Numbers of all layers.

    Attributes:
        attends: for each layer, whether it attends; the others are Kimi delta attention.
        sparse: for each layer, whether it has experts; the others have an MLP.
        inner: of the MLP; ``shared_inner`` of the experts that all tokens pass, together.
    """

    attends: tuple[bool, ...]
    sparse: tuple[bool, ...]
    attention: LatentSizes
    delta: DeltaSizes
    experts: MoESizes
    inner: int
    shared_inner: int
    activation: str


def adapt(fields: Fields) -> Fields:
    """The checkpoint's names of settings made transformers'."""
    return fields.over(
        {new: fields.raw[old] for old, new in _NAMES.items() if fields.raw.get(old) is not None}
    )


def read(fields: Fields) -> KimiSizes:
    """Numbers from transformers' ``KimiLinearConfig`` or from the published configuration.

    Raises:
        CheckpointError: positions in latent attention, scores that aren't sigmoids, another activation than silu
            or heads that share keys.
    """
    fields.only(
        {
            "hidden_act": ("silu", "swish"),
            "mla_use_nope": (True,),
            "moe_router_activation_func": ("sigmoid",),
            "moe_layer_freq": (1,),
            "num_key_value_heads": (fields.whole("num_attention_heads"),),
        }
    )
    experts = read_experts(fields)
    return KimiSizes(
        attends=_read_kinds(fields),
        sparse=_read_sparse(fields),
        attention=_read_attention(fields),
        delta=_read_delta(fields),
        experts=experts,
        inner=fields.whole("intermediate_size"),
        shared_inner=experts.inner * fields.whole("n_shared_experts", 1),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _read_kinds(fields: Fields) -> tuple[bool, ...]:
    """``layer_types``, or lists of layers that count from one."""
    layers, lists = fields.whole("num_hidden_layers"), fields.section("linear_attn_config")
    if fields.raw.get("layer_types") is not None:
        return tuple(KINDS[kind] for kind in fields.choices("layer_types", KINDS, layers))
    if lists.raw.get("full_attn_layers") is None:
        return tuple(i > 0 and i % 4 == 0 for i in range(layers))
    attending, others = lists.ids("full_attn_layers"), lists.ids("kda_layers")
    if sorted((*attending, *others)) != list(range(1, layers + 1)):
        raise fields.wrong("linear_attn_config", f"its lists must share out the layers 1 to {layers}.")
    return tuple(i + 1 in attending for i in range(layers))


def _read_sparse(fields: Fields) -> tuple[bool, ...]:
    layers = fields.whole("num_hidden_layers")
    if fields.raw.get("mlp_layer_types") is not None:
        kinds = fields.choices("mlp_layer_types", ("dense", "sparse"), layers)
        return tuple(kind == "sparse" for kind in kinds)
    dense = fields.whole("first_k_dense_replace", 1, least=0)
    return tuple(i >= dense for i in range(layers))


def _read_attention(fields: Fields) -> LatentSizes:
    own, shared = fields.whole("qk_nope_head_dim", 128), fields.whole("qk_rope_head_dim", 64)
    return LatentSizes(
        hidden=fields.whole("hidden_size"),
        num_heads=fields.whole("num_attention_heads"),
        own_dim=own,
        shared_dim=shared,
        value_dim=fields.whole("v_head_dim", 128),
        rank=fields.whole("kv_lora_rank", 512),
        scale=(own + shared) ** -0.5,
        norm_eps=_LATENT_EPS,
        query_rank=0 if fields.raw.get("q_lora_rank") is None else fields.whole("q_lora_rank"),
        bias=fields.flag("attention_bias", False),
    )


def _read_delta(fields: Fields) -> DeltaSizes:
    own = fields.section("linear_attn_config")
    heads = own.whole("num_heads", fields.whole("linear_num_heads", 32))
    dim = own.whole("head_dim", fields.whole("linear_head_dim", 128))
    return DeltaSizes(
        hidden=fields.whole("hidden_size"),
        key_heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        conv_kernel=own.whole(
            "short_conv_kernel_size", fields.whole("linear_conv_kernel_dim", 4, least=2), least=2
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        rank=dim,
    )


def read_experts(
    fields: Fields,
    *,
    inner: int = 1024,
    num_experts: int = 256,
    scale: float = 2.446,
    groups: int = 1,
    groups_kept: int = 1,
) -> MoESizes:
    """Experts chosen by sigmoid scores with a bias for the choice; the arguments are a family's defaults."""
    return MoESizes(
        hidden=fields.whole("hidden_size"),
        inner=fields.whole("moe_intermediate_size", inner),
        num_experts=fields.whole("num_local_experts", num_experts),
        routing=Routing(
            fields.whole("num_experts_per_tok", 8),
            score="sigmoid",
            renormalise=fields.flag("norm_topk_prob", True),
            eps=1e-20,
            scale=fields.number("routed_scaling_factor", scale),
            groups=fields.whole("n_group", groups),
            groups_kept=fields.whole("topk_group", groups_kept),
        ),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        has_bias=True,
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then experts or an MLP, each behind a norm."""
    sizes, tools, width = config.sizes, parts.tools, config.hidden_size
    assert isinstance(sizes, KimiSizes)

    def dense(inner: int) -> GatedMLP:
        return GatedMLP(width, inner, activation=sizes.activation, bias=False, **tools)

    def mixer(attends: bool) -> nn.Module:
        if attends:
            return LatentAttention(sizes.attention, **tools)
        return KimiDeltaAttention(sizes.delta, **tools)

    def block(attends: bool, sparse: bool) -> Block:
        return Block(
            parts.dtypes.act,
            norm=RMSNorm(width, config.norm_eps, **tools),
            mixer=mixer(attends),
            mlp_norm=RMSNorm(width, config.norm_eps, **tools),
            mlp=MoE(sizes.experts, shared=dense(sizes.shared_inner), **tools)
            if sparse
            else dense(sizes.inner),
        )

    return HybridLM(config, map(block, sizes.attends, sizes.sparse), parts)


def entries(config: ModelConfig) -> Map:
    """As published, experts below ``block_sparse_moe``, which is read as ``mlp``."""
    sizes = config.sizes
    assert isinstance(sizes, KimiSizes)
    layer, mixer, mlp = "model.layers.{i}", "layers.{i}.mixer", "layers.{i}.mlp"
    names = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
    d = sizes.delta
    rows = (d.keys, d.keys, d.values, d.rank, d.rank, d.value_heads)
    return (
        *outer_entries(),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.post_attention_layernorm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        *side_by_side(f"{layer}.self_attn", f"{mixer}.in_proj.weight", zip(names, rows, strict=True)),
        Entry(f"{layer}.self_attn.f_b_proj.weight", f"{mixer}.decay_proj.weight"),
        Entry(f"{layer}.self_attn.g_b_proj.weight", f"{mixer}.gate_proj.weight"),
        *delta_entries(d, f"{layer}.self_attn", mixer, norm="o_norm", out="o_proj"),
        *latent_entries(sizes.attention, f"{layer}.self_attn", mixer),
        *gated_mlp_entries(sizes.inner, f"{layer}.mlp", mlp),
        Entry(f"{layer}.mlp.gate.weight", f"{mlp}.router"),
        Entry(f"{layer}.mlp.gate.e_score_correction_bias", f"{mlp}.router_bias", draw=draw_zeros),
        *expert_entries(f"{layer}.mlp.experts", mlp, sizes.experts.inner, names=("w1", "w3", "w2")),
        *gated_mlp_entries(sizes.shared_inner, f"{layer}.mlp.shared_experts", f"{mlp}.shared"),
    )


KIMI_LINEAR = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act", "num_experts"}),
    adapt=adapt,
    renames=((r"\.block_sparse_moe\.", ".mlp."), (r"\.self_attn\.forget_gate\.", ".self_attn.")),
)
