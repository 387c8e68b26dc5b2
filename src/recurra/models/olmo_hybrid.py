"""OLMo Hybrid: gated delta nets normed before, as usual, and attention layers whose norms come after, queries' and keys' too.

    x += delta(norm(x));        x += mlp(norm(x))
    x += norm(attention(x));    x += norm(mlp(x))

Strengths of corrections may reach 2, so that a state's eigenvalues may be negative. Sources: OLMo 2 (Team OLMo, 2024) for
the norms; Grazzi et al., 2024, for the eigenvalues.
"""

from __future__ import annotations

from dataclasses import dataclass

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.delta import DeltaSizes, GatedDeltaNet
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.norm import RMSNorm
from recurra.layers.rotary import RotarySizes
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import at, attention_entries, delta_entries, gated_mlp_entries, side_by_side
from recurra.models.qwen3_next import KINDS
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, draw_ones

#: Of the norm before a delta net's gate, whatever the configuration says of the others.
_GATED_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class OlmoHybridSizes:
    """``attends``: for each layer, whether it attends; the others are gated delta nets."""

    attends: tuple[bool, ...]
    attention: AttentionSizes
    delta: DeltaSizes
    inner: int
    activation: str


def read(fields: Fields) -> OlmoHybridSizes:
    """Numbers from transformers' ``OlmoHybridConfig``."""
    return OlmoHybridSizes(
        attends=_read_kinds(fields),
        attention=_read_attention(fields),
        delta=_read_delta(fields),
        inner=fields.whole("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _read_kinds(fields: Fields) -> tuple[bool, ...]:
    layers = fields.whole("num_hidden_layers")
    if fields.raw.get("layer_types") is not None:
        return tuple(KINDS[kind] for kind in fields.choices("layer_types", KINDS, layers))
    return tuple(i % 4 == 3 or (layers < 4 and i == layers - 1) for i in range(layers))


def _read_attention(fields: Fields) -> AttentionSizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim, bias = _or(fields, "head_dim", hidden // heads), fields.flag("attention_bias", False)
    return AttentionSizes(
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_or(fields, "num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        out_bias=bias,
        rotary=_read_rotary(fields, head_dim),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_heads=False,
    )


def _read_rotary(fields: Fields, head_dim: int) -> RotarySizes | None:
    """None without a ``rope_theta``, as in the released checkpoints: no positions."""
    stated = (fields, fields.section("rope_parameters"), fields.section("rope_scaling"))
    if all(where.raw.get("rope_theta") is None for where in stated):
        return None
    return read_rotary(fields, head_dim)


def _read_delta(fields: Fields) -> DeltaSizes:
    fields.only({"hidden_act": ("silu", "swish")})
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    key_heads = _or(fields, "linear_num_key_heads", heads)
    value_heads = _or(fields, "linear_num_value_heads", heads)
    if value_heads % key_heads:
        raise fields.wrong(
            "linear_num_value_heads", f"must be a multiple of linear_num_key_heads={key_heads}."
        )
    key_dim = _or(fields, "linear_key_head_dim", int(0.75 * hidden / key_heads))
    return DeltaSizes(
        hidden=hidden,
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=key_dim,
        value_dim=_or(fields, "linear_value_head_dim", 2 * key_dim),
        conv_kernel=fields.whole("linear_conv_kernel_dim", 4, least=2),
        norm_eps=_GATED_EPS,
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )


def _or(fields: Fields, key: str, default: int) -> int:
    """A whole number, or the default where the file says null."""
    return default if fields.raw.get(key) is None else fields.whole(key)


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then an MLP, their norms before or after."""
    sizes, tools = config.sizes, parts.tools
    assert isinstance(sizes, OlmoHybridSizes)

    def norm() -> RMSNorm:
        return RMSNorm(config.hidden_size, config.norm_eps, **tools)

    def block(attends: bool) -> Block:
        mlp = GatedMLP(config.hidden_size, sizes.inner, activation=sizes.activation, bias=False, **tools)
        if attends:
            mixer = Attention(sizes.attention, **tools)
            return Block(
                parts.dtypes.act, mixer=mixer, post_norm=norm(), mlp=mlp, mlp_post_norm=norm()
            )  # fmt: skip
        return Block(
            parts.dtypes.act, norm=norm(), mixer=GatedDeltaNet(sizes.delta, **tools), mlp_norm=norm(), mlp=mlp
        )

    return HybridLM(config, map(block, sizes.attends), parts)


def entries(config: ModelConfig) -> Map:
    """As published; transformers' own names for the norms are made the published ones."""
    sizes = config.sizes
    assert isinstance(sizes, OlmoHybridSizes)
    layer, d = "model.layers.{i}", sizes.delta
    attending = [i for i, attends in enumerate(sizes.attends) if attends]
    others = [i for i, attends in enumerate(sizes.attends) if not attends]
    names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
    rows = (d.keys, d.keys, d.values, d.values, d.value_heads, d.value_heads)
    after = f"{layer}.post_attention_layernorm.weight"
    return (
        *outer_entries(),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        *at(others, (Entry(after, "layers.{i}.mlp_norm.weight", draw=draw_ones),)),
        *at(attending, (Entry(after, "layers.{i}.post_norm.weight", draw=draw_ones),)),
        Entry(
            f"{layer}.post_feedforward_layernorm.weight", "layers.{i}.mlp_post_norm.weight", draw=draw_ones
        ),
        *side_by_side(
            f"{layer}.linear_attn", "layers.{i}.mixer.in_proj.weight", zip(names, rows, strict=True)
        ),
        *delta_entries(d, f"{layer}.linear_attn", "layers.{i}.mixer", norm="o_norm", out="o_proj"),
        *attention_entries(sizes.attention, f"{layer}.self_attn", "layers.{i}.mixer"),
        *gated_mlp_entries(sizes.inner, f"{layer}.mlp", "layers.{i}.mlp"),
    )


OLMO_HYBRID = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act"}),
    renames=(
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
    skips=(r"mtp\.",),
)
