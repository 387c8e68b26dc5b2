"""RecurrentGemma (Griffin): real-gated linear recurrent units with local attention in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.norm import RMSNorm
from recurra.layers.rg_lru import RGLRUMixer, RGLRUSizes, negative_softplus_8
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import attention_entries, gated_mlp_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, Rows, draw_ones, draw_zeros, filters, one_plus


@dataclass(frozen=True, slots=True)
class RecurrentGemmaSizes:
    """``attends``: which layers attend; the others are recurrent."""

    attends: tuple[bool, ...]
    attention: AttentionSizes
    recurrent: RGLRUSizes
    inner: int
    activation: str
    softcap: float


def read(fields: Fields) -> RecurrentGemmaSizes:
    """Numbers from transformers' ``RecurrentGemmaConfig``."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    head_dim, layers = hidden // heads, fields.whole("num_hidden_layers")
    kinds = fields.raw.get("block_types") or ["recurrent", "recurrent", "attention"]
    if not set(kinds) <= {"recurrent", "attention"}:
        raise fields.wrong("block_types", "each is 'recurrent' or 'attention'.")
    activation = fields.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh")
    channels = fields.whole("lru_width", hidden) if fields.raw.get("lru_width") else hidden
    kv_heads = fields.whole("num_key_value_heads") if fields.raw.get("num_key_value_heads") else heads
    return RecurrentGemmaSizes(
        attends=tuple(kinds[i % len(kinds)] == "attention" for i in range(layers)),
        attention=AttentionSizes(
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            bias=fields.flag("attention_bias", False),
            out_bias=True,
            rotary=read_rotary(fields, head_dim, partial=0.5),
            window=fields.whole(
                "attention_window_size" if "attention_window_size" in fields.raw else "sliding_window", 2048
            ),
        ),
        recurrent=RGLRUSizes(
            hidden=hidden,
            channels=channels,
            num_blocks=heads,
            conv_kernel=fields.whole("conv1d_width", 4, least=2),
            activation=activation,
        ),
        inner=fields.whole("intermediate_size") // 2,
        activation=activation,
        softcap=fields.number("logits_soft_cap", 30.0),
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then an MLP, each behind a norm."""
    sizes, tools, width = config.sizes, parts.tools, config.hidden_size
    assert isinstance(sizes, RecurrentGemmaSizes)

    def block(i: int) -> Block:
        return Block(
            parts.dtypes.act,
            norm=RMSNorm(width, config.norm_eps, **tools),
            mixer=Attention(sizes.attention, **tools)
            if sizes.attends[i]
            else RGLRUMixer(sizes.recurrent, **tools),
            mlp_norm=RMSNorm(width, config.norm_eps, **tools),
            mlp=GatedMLP(width, sizes.inner, activation=sizes.activation, bias=True, **tools),
        )

    # The model was trained with the factor in bfloat16.
    scale = float(torch.tensor(width**0.5, dtype=torch.bfloat16))
    blocks = map(block, range(config.num_layers))
    return HybridLM(config, blocks, parts, embedding_scale=scale, softcap=sizes.softcap)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it."""
    sizes = config.sizes
    assert isinstance(sizes, RecurrentGemmaSizes)
    layer, channels = "model.layers.{i}", sizes.recurrent.channels
    norms = (("temporal_pre_norm", "norm"), ("channel_pre_norm", "mlp_norm"))
    return (
        *outer_entries(norm="model.final_norm.weight", convert=one_plus),
        *(
            Entry(f"{layer}.{stored}.weight", f"layers.{{i}}.{target}.weight", one_plus, draw_ones)
            for stored, target in norms
        ),
        *_recurrent(f"{layer}.temporal_block", "layers.{i}.mixer", channels),
        *attention_entries(sizes.attention, f"{layer}.temporal_block", "layers.{i}.mixer"),
        *gated_mlp_entries(sizes.inner, f"{layer}.mlp_block", "layers.{i}.mlp"),
    )


def _recurrent(stored: str, target: str, channels: int) -> tuple[Entry, ...]:
    places = (("linear_y", Rows(0, channels)), ("linear_x", Rows(channels, channels)))
    gates = ("input_gate", "recurrent_gate")
    return (
        *(Entry(f"{stored}.{name}.weight", f"{target}.in_proj.weight", part=at) for name, at in places),
        *(
            Entry(f"{stored}.{name}.bias", f"{target}.in_proj.bias", draw=draw_zeros, part=at)
            for name, at in places
        ),
        Entry(f"{stored}.conv_1d.weight", f"{target}.conv1d.weight", filters),
        Entry(f"{stored}.conv_1d.bias", f"{target}.conv1d.bias", draw=draw_zeros),
        Entry(f"{stored}.rg_lru.recurrent_param", f"{target}.log_decay", negative_softplus_8, _draw_decays),
        *(Entry(f"{stored}.rg_lru.{gate}_weight", f"{target}.{gate}.weight") for gate in gates),
        *(Entry(f"{stored}.rg_lru.{gate}_bias", f"{target}.{gate}.bias", draw=draw_zeros) for gate in gates),
        Entry(f"{stored}.linear_out.weight", f"{target}.out_proj.weight"),
        Entry(f"{stored}.linear_out.bias", f"{target}.out_proj.bias", draw=draw_zeros),
    )


def _draw_decays(value: Tensor, generator: torch.Generator) -> None:
    """Decays a step between 0.9 and 0.999 where the gate is open."""
    value.uniform_(0.9, 0.999, generator=generator).log_()


RECURRENT_GEMMA = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=True,
)
