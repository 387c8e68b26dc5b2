"""Phi-4-flash (SambaY): Mamba and windowed attention in the first half; the second half reads one layer's memory and
one layer's keys.

With L layers: even ones are Mamba up to L/2, whose output before its gate is the memory of the later even ones; odd
ones attend, those below L/2 through a window, L/2 + 1 fully, and the later ones to that layer's keys and values.
transformers has no class for it; the published names are in :func:`entries`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recurra.cache.spec import LayerState
from recurra.layers.base import mix
from recurra.layers.mamba1 import Mamba1Sizes, MambaMixer
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.norm import LayerNorm
from recurra.layers.samba_y import DiffAttention, DiffAttentionSizes, GatedMemory, MemoryMamba
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, HybridLM, outer_entries
from recurra.models.maps import at, mamba1_entries
from recurra.models.weights import Entry, Map, draw_ones, draw_zeros
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class Phi4FlashSizes:
    """``windows``: of each layer; 0 where there is none."""

    layers: int
    num_heads: int
    num_kv_heads: int
    windows: tuple[int, ...]
    mamba: Mamba1Sizes
    inner: int
    activation: str

    @property
    def memory_layer(self) -> int:
        """The Mamba layer whose output the later even layers read; the next layer's keys are shared likewise."""
        return self.layers // 2

    def attention(self, layer: int) -> DiffAttentionSizes:
        """An odd layer's numbers."""
        own = layer <= self.memory_layer + 1
        return DiffAttentionSizes(
            self.mamba.hidden, self.num_heads, self.num_kv_heads, layer, self.windows[layer], own
        )


def read(fields: Fields) -> Phi4FlashSizes:
    """Numbers from the published configuration, ``model_type`` phi4flash."""
    hidden, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers", least=4)
    fields.only({"mb_per_layer": (2,), "lm_head_bias": (False,), "mlp_bias": (False,)})
    if layers % 4:
        raise fields.wrong(
            "num_hidden_layers", "must be a multiple of 4: both halves begin with a Mamba layer."
        )
    heads, kv_heads = fields.whole("num_attention_heads"), fields.whole("num_key_value_heads")
    if heads % 2 or kv_heads % 2 or hidden % heads:
        raise fields.wrong("num_attention_heads", "heads and key heads must be even, and divide hidden_size.")
    rank = fields.raw.get("mamba_dt_rank", "auto")
    return Phi4FlashSizes(
        layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        windows=_windows(fields, layers),
        mamba=Mamba1Sizes(
            hidden=hidden,
            channels=fields.whole("mamba_expand", 2) * hidden,
            state_size=fields.whole("mamba_d_state", 16),
            conv_kernel=fields.whole("mamba_d_conv", 4, least=2),
            dt_rank=-(-hidden // 16) if rank == "auto" else fields.whole("mamba_dt_rank"),
            use_bias=fields.flag("mamba_proj_bias", False),
            use_conv_bias=fields.flag("mamba_conv_bias", True),
        ),
        inner=fields.whole("intermediate_size"),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
    )


def _windows(fields: Fields, layers: int) -> tuple[int, ...]:
    """``sliding_window`` is one number for the odd layers of the first half, or a list of all layers'."""
    given = fields.raw.get("sliding_window")
    if isinstance(given, list):
        if len(given) != layers:
            raise fields.wrong("sliding_window", f"must have an entry for each of {layers} layers.")
        return tuple(int(window or 0) for window in given)
    window = fields.whole("sliding_window") if given else 0
    return tuple(window if i % 2 and i < layers // 2 else 0 for i in range(layers))


@dataclass(slots=True)
class Shared:
    """What later layers read of earlier ones in a step: the memory (T, channels), and the keys and values."""

    memory: Tensor | None = None
    keys: LayerState | None = None


class Phi4FlashLayer(nn.Module):
    """A mixer and an MLP, each behind a layer norm; what kind of mixer decides what it reads and shares."""

    def __init__(self, sizes: Phi4FlashSizes, layer: int, config: ModelConfig, parts: Build) -> None:
        super().__init__()
        tools, width = parts.tools, config.hidden_size
        self._act, self._residual = parts.dtypes.act, parts.dtypes.residual
        self._shares_keys = layer == sizes.memory_layer + 1
        self.norm, self.mlp_norm = (LayerNorm(width, config.norm_eps, **tools) for _ in range(2))
        self.mixer: nn.Module
        if layer % 2:
            self.mixer = DiffAttention(sizes.attention(layer), **tools)
        elif layer < sizes.memory_layer:
            self.mixer = MambaMixer(sizes.mamba, **tools)
        elif layer == sizes.memory_layer:
            self.mixer = MemoryMamba(sizes.mamba, **tools)
        else:
            mamba = sizes.mamba
            self.mixer = GatedMemory(mamba.hidden, mamba.channels, bias=mamba.use_bias, **tools)
        self.mlp = GatedMLP(width, sizes.inner, activation=sizes.activation, bias=False, **tools)
        remembers = layer <= sizes.memory_layer + 1
        self.mixers: tuple[Any, ...] = (self.mixer,) if remembers else ()

    def forward(
        self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...], shared: Shared
    ) -> Tensor:
        x = x + self._mix(self.norm(x).to(self._act), batch, states, shared)
        y: Tensor = x + self.mlp(self.mlp_norm(x).to(self._act))
        return y

    def _mix(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...], shared: Shared) -> Tensor:
        mixer = self.mixer
        if isinstance(mixer, GatedMemory):
            assert shared.memory is not None
            gated: Tensor = mixer(x, shared.memory)
            return gated
        if isinstance(mixer, MemoryMamba):
            shared.memory, z = mix(mixer, x, batch, states[0]).chunk(2, dim=-1)
            return mixer.gated(shared.memory, z)
        if self._shares_keys:
            shared.keys = states[0]
        state = states[0] if states else shared.keys
        assert state is not None
        return mix(mixer, x, batch, state)  # type: ignore[arg-type]


class Phi4FlashLM(HybridLM):
    """Layers hand memory and keys to those that come later."""

    def run_layers(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """See :class:`HybridLM`."""
        shared, start = Shared(), 0
        for layer in self.layers:
            assert isinstance(layer, Phi4FlashLayer)
            x = layer(x, batch, states[start : start + len(layer.mixers)], shared)
            start += len(layer.mixers)
        return x


def build(config: ModelConfig, parts: Build) -> Phi4FlashLM:
    """Every layer: a mixer, then an MLP."""
    sizes = config.sizes
    assert isinstance(sizes, Phi4FlashSizes)
    layers = (Phi4FlashLayer(sizes, i, config, parts) for i in range(config.num_layers))
    norm = LayerNorm(config.hidden_size, config.norm_eps, **parts.tools)
    return Phi4FlashLM(config, layers, parts, final_norm=norm)


def _row(value: Tensor) -> Tensor:
    return value[None]


def _draw_lambdas(value: Tensor, generator: torch.Generator) -> None:
    value.normal_(0.0, 0.1, generator=generator)


@dataclass(frozen=True, slots=True)
class _Lambda:
    """The row of ``lambdas`` that one stored vector fills."""

    row: int

    def __call__(self, parameter: Tensor) -> Tensor:
        return parameter[self.row : self.row + 1]


def entries(config: ModelConfig) -> Map:
    """As published."""
    sizes = config.sizes
    assert isinstance(sizes, Phi4FlashSizes)
    layer, mixer, target = "model.layers.{i}", "model.layers.{i}.attn", "layers.{i}.mixer"
    norms = (("input_layernorm", "norm"), ("post_attention_layernorm", "mlp_norm"))
    names = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
    inner = f"{mixer}.inner_cross_attn"
    return (
        *outer_entries(norm="model.final_layernorm.weight"),
        Entry("model.final_layernorm.bias", "norm_f.bias", draw=draw_zeros),
        *(Entry(f"{layer}.{name}.weight", f"layers.{{i}}.{to}.weight", draw=draw_ones) for name, to in norms),
        *(Entry(f"{layer}.{name}.bias", f"layers.{{i}}.{to}.bias", draw=draw_zeros) for name, to in norms),
        *at(range(0, sizes.layers, 2), mamba1_entries(mixer, target)),
        *at(
            range(1, sizes.layers, 2),
            (
                Entry(f"{mixer}.Wqkv.weight", f"{target}.qkv.weight"),
                Entry(f"{mixer}.Wqkv.bias", f"{target}.qkv.bias", draw=draw_zeros),
                Entry(f"{mixer}.out_proj.weight", f"{target}.o_proj.weight"),
                Entry(f"{mixer}.out_proj.bias", f"{target}.o_proj.bias", draw=draw_zeros),
                Entry(f"{inner}.subln.weight", f"{target}.subln.weight", draw=draw_ones),
                *(
                    Entry(f"{inner}.{name}", f"{target}.lambdas", _row, _draw_lambdas, part=_Lambda(row))
                    for row, name in enumerate(names)
                ),
            ),
        ),
        Entry(f"{layer}.mlp.fc1.weight", "layers.{i}.mlp.w_in.weight"),
        Entry(f"{layer}.mlp.fc2.weight", "layers.{i}.mlp.w_out.weight"),
    )


PHI4_FLASH = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=True,
    handles=frozenset({"hidden_act"}),
    residual_in_fp32=True,
)
