"""Falcon-H1: attention and Mamba-2 side by side in every layer, then a gated MLP; muP multipliers throughout.

    x += ssm_out * mamba(n) + attention_out * attention(attention_in * n)      with n = norm(x)
    x += mlp(norm(x))

Source: Falcon-H1 (Zuo et al., 2025), section 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recurra.cache.spec import LayerState
from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.base import mix
from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.layers.mlp import ACTIVATIONS, GatedMLP
from recurra.layers.norm import Gate, NormThenGate, RMSNorm
from recurra.models.bamba import read_mamba
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, HybridLM, outer_entries
from recurra.models.maps import attention_entries, gated_mlp_entries, mamba2_entries
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, draw_ones
from recurra.types import ForwardBatch


@dataclass(frozen=True, slots=True)
class FalconH1Sizes:
    """Numbers of every layer.

    Attributes:
        gated_norm: "gate first" (Mamba-2's), "norm first" or "none", where the output is gated only.
        ssm: multipliers of what enters and leaves Mamba; ``parts`` of the projected z, x, B, C and dt.
        attended: multipliers of what enters and leaves attention.
        mlp: multipliers of the MLP's gate and result.
        embedding, head: multipliers of embedded tokens and of the scores.
    """

    attention: AttentionSizes
    mamba: Mamba2Sizes
    gated_norm: str
    inner: int
    mlp_bias: bool
    activation: str
    ssm: tuple[float, float]
    parts: tuple[float, ...]
    attended: tuple[float, float]
    mlp: tuple[float, ...]
    embedding: float
    head: float


def read(fields: Fields) -> FalconH1Sizes:
    """Numbers from transformers' ``FalconH1Config``."""
    normed, first = fields.flag("mamba_rms_norm", False), fields.flag("mamba_norm_before_gate", True)
    inner = None if fields.raw.get("mamba_d_ssm", 1024) is None else fields.whole("mamba_d_ssm", 1024)
    one = fields.number
    return FalconH1Sizes(
        attention=_read_attention(fields),
        mamba=read_mamba(fields, inner=inner, out_bias=fields.flag("projectors_bias", False)),
        gated_norm="none" if not normed else ("norm first" if first else "gate first"),
        inner=fields.whole("intermediate_size"),
        mlp_bias=fields.flag("mlp_bias", False),
        activation=fields.choice("hidden_act", ACTIVATIONS, "silu"),
        ssm=(one("ssm_in_multiplier", 1.0), one("ssm_out_multiplier", 1.0)),
        parts=fields.numbers("ssm_multipliers", 5, [1.0] * 5),
        attended=(one("attention_in_multiplier", 1.0), one("attention_out_multiplier", 1.0)),
        mlp=fields.numbers("mlp_multipliers", 2, [1.0] * 2),
        embedding=one("embedding_multiplier", 1.0),
        head=one("lm_head_multiplier", 1.0),
    )


def _read_attention(fields: Fields) -> AttentionSizes:
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads", 32)
    head_dim = fields.whole("head_dim", hidden // heads)
    bias = fields.flag("attention_bias", False)
    return AttentionSizes(
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", 8),
        head_dim=head_dim,
        # Keys enter the scores alone, so their multiplier is the scores'.
        scale=head_dim**-0.5 * fields.number("key_multiplier", 1.0),
        bias=bias,
        out_bias=bias,
        rotary=read_rotary(fields, head_dim),
    )


class ScaledMamba(MambaMixer2):
    """Mamba-2 with a multiplier for each part of what its projection gives."""

    def __init__(self, sizes: FalconH1Sizes, norm: nn.Module | None, parts: Build) -> None:
        super().__init__(sizes.mamba, norm=norm, **parts.tools)
        m = sizes.mamba
        columns = (m.inner, m.inner, m.num_groups * m.state_size, m.num_groups * m.state_size, m.num_heads)
        vector = [by for by, count in zip(sizes.parts, columns, strict=True) for _ in range(count)]
        self._parts = torch.tensor(vector, dtype=parts.dtypes.act, device=parts.device)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`MambaMixer2`."""
        s = self.sizes
        projected = self.in_proj(x) * self._parts
        z, xBC, dt = torch.split(projected, [s.inner, s.conv_channels, s.num_heads], dim=-1)
        return z, xBC, dt


class ScaledMLP(GatedMLP):
    """A gated MLP with multipliers of its gate and its result."""

    def __init__(self, hidden: int, sizes: FalconH1Sizes, parts: Build) -> None:
        super().__init__(hidden, sizes.inner, activation=sizes.activation, bias=sizes.mlp_bias, **parts.tools)
        self._gate, self._out = sizes.mlp

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w_in(x).chunk(2, dim=-1)
        out: Tensor = self.w_out(self.act(gate * self._gate) * up)
        return out * self._out


class ParallelBlock(nn.Module):
    """Both mixers see the same normed input; see :class:`recurra.models.hybrid.Layer`."""

    def __init__(self, config: ModelConfig, sizes: FalconH1Sizes, parts: Build) -> None:
        super().__init__()
        tools, width, eps = parts.tools, config.hidden_size, config.norm_eps
        self.norm, self.mlp_norm = RMSNorm(width, eps, **tools), RMSNorm(width, eps, **tools)
        self.mamba = ScaledMamba(sizes, _gated_norm(sizes, parts), parts)
        self.attention = Attention(sizes.attention, **tools)
        self.mlp = ScaledMLP(width, sizes, parts)
        self.mixers = (self.mamba, self.attention)
        self._sizes, self._act = sizes, parts.dtypes.act

    def forward(self, x: Tensor, batch: ForwardBatch, states: tuple[LayerState, ...]) -> Tensor:
        """See :class:`recurra.models.hybrid.Layer`."""
        (ssm_in, ssm_out), (attended_in, attended_out) = self._sizes.ssm, self._sizes.attended
        normed = self.norm(x).to(self._act)
        remembered = mix(self.mamba, normed * ssm_in, batch, states[0]) * ssm_out
        attended = mix(self.attention, normed * attended_in, batch, states[1]) * attended_out
        x = x + (remembered + attended)
        mlp: Tensor = self.mlp(self.mlp_norm(x).to(self._act))
        return x + mlp


def _gated_norm(sizes: FalconH1Sizes, parts: Build) -> nn.Module | None:
    if sizes.gated_norm == "none":
        return Gate()
    if sizes.gated_norm == "gate first":
        return None
    m = sizes.mamba
    return NormThenGate(m.inner, m.inner // m.num_groups, m.norm_eps, **parts.tools)


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """All layers alike."""
    sizes = config.sizes
    assert isinstance(sizes, FalconH1Sizes)
    blocks = (ParallelBlock(config, sizes, parts) for _ in range(config.num_layers))
    return HybridLM(config, blocks, parts, embedding_scale=sizes.embedding, logits_scale=sizes.head)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it."""
    sizes = config.sizes
    assert isinstance(sizes, FalconH1Sizes)
    layer = "model.layers.{i}"
    return (
        *outer_entries(norm="model.final_layernorm.weight"),
        Entry(f"{layer}.input_layernorm.weight", "layers.{i}.norm.weight", draw=draw_ones),
        Entry(f"{layer}.pre_ff_layernorm.weight", "layers.{i}.mlp_norm.weight", draw=draw_ones),
        *mamba2_entries(f"{layer}.mamba", "layers.{i}.mamba"),
        *attention_entries(sizes.attention, f"{layer}.self_attn", "layers.{i}.attention"),
        *gated_mlp_entries(sizes.inner, f"{layer}.feed_forward", "layers.{i}.mlp"),
    )


FALCON_H1 = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=False,
    handles=frozenset({"hidden_act", "embedding_multiplier", "lm_head_multiplier", "ssm_multipliers"}),
)
