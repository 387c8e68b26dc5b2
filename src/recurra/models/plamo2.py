"""PLaMo 2: Mamba layers with an attention layer every few, norms before and after each part.

transformers has no class for it; the names and offsets of the published checkpoints are in :func:`entries`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from recurra.layers.attention import AttentionSizes
from recurra.layers.mlp import GatedMLP
from recurra.layers.norm import RMSNorm
from recurra.layers.plamo2 import PlamoAttention, PlamoMamba, PlamoMambaSizes
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import TIED, Block, HybridLM, outer_entries
from recurra.models.maps import draw_decays
from recurra.models.rotary import read_rotary
from recurra.models.weights import Entry, Map, draw_ones, draw_steps, filters, negative_exp, one_plus


@dataclass(frozen=True, slots=True)
class Plamo2Sizes:
    """``attention``: of each layer that attends, None where Mamba is."""

    attention: tuple[AttentionSizes | None, ...]
    mamba: PlamoMambaSizes
    inner: int
    norm_eps: float


def read(fields: Fields) -> Plamo2Sizes:
    """Numbers from the published configuration, ``PlamoConfig`` with ``model_type`` plamo2."""
    hidden, layers = fields.whole("hidden_size"), fields.whole("num_hidden_layers")
    eps = fields.number("rms_norm_eps", 1e-6)
    fields.only({"mamba_enabled": (True,)})
    return Plamo2Sizes(
        attention=tuple(
            _attention(fields, i) if _attends(fields, i, layers) else None for i in range(layers)
        ),
        mamba=PlamoMambaSizes(
            hidden=hidden,
            num_heads=fields.whole("mamba_num_heads", 64),
            head_dim=fields.whole("hidden_size_per_head", 128),
            state_size=fields.whole("mamba_d_state", 64),
            conv_kernel=fields.whole("mamba_d_conv", 4, least=2),
            dt_rank=max(64, hidden // 16),
            norm_eps=eps,
        ),
        inner=fields.whole("intermediate_size"),
        norm_eps=eps,
    )


def _attends(fields: Fields, layer: int, layers: int) -> bool:
    """One layer in the middle of every ``mamba_step``; in a model with few layers the last one."""
    step = fields.whole("mamba_step", 2, least=2)
    return layer == layers - 1 if layers <= step // 2 else layer % step == step // 2


def _attention(fields: Fields, layer: int) -> AttentionSizes:
    """Full attention, unless ``full_attention_idx`` names other layers: these see a window."""
    head_dim, heads = fields.whole("hidden_size_per_head", 128), fields.whole("num_attention_heads")
    full = fields.raw.get("full_attention_idx")
    windowed = full is not None and layer not in fields.ids("full_attention_idx")
    return AttentionSizes(
        hidden=fields.whole("hidden_size"),
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        rotary=read_rotary(fields, head_dim),
        window=fields.whole("attention_window_size", 2048) if windowed else 0,
    )


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """Every layer: a mixer, then an MLP, each between two norms."""
    sizes, tools, width = config.sizes, parts.tools, config.hidden_size
    assert isinstance(sizes, Plamo2Sizes)

    def block(i: int) -> Block:
        attention = sizes.attention[i]
        norms = [RMSNorm(width, sizes.norm_eps, **tools) for _ in range(4)]
        return Block(
            parts.dtypes.act,
            norm=norms[0],
            mixer=PlamoMamba(sizes.mamba, **tools)
            if attention is None
            else PlamoAttention(attention, sizes.norm_eps, **tools),
            post_norm=norms[1],
            mlp_norm=norms[2],
            mlp=GatedMLP(width, sizes.inner, activation="silu", bias=False, **tools),
            mlp_post_norm=norms[3],
        )

    return HybridLM(config, map(block, range(config.num_layers)), parts)


def _offset(value: Tensor, by: float) -> Tensor:
    """Norms multiply by the stored weight plus a number, which differs from norm to norm."""
    return one_plus(value) + (by - 1.0)


def _gate_first(value: Tensor, heads: int) -> Tensor:
    """in_proj's rows, stored head by head (gate, then x), to all gates and then all x."""
    by_head = value.view(heads, 2, -1, value.shape[-1])
    return by_head.transpose(0, 1).reshape(value.shape)


def entries(config: ModelConfig) -> Map:
    """As published; projections of queries, keys and values, and of gate and up, are stored fused."""
    sizes = config.sizes
    assert isinstance(sizes, Plamo2Sizes)
    layer = "model.layers.layers.{i}"
    mixer, target = f"{layer}.mixer", "layers.{i}.mixer"
    offsets = (
        ("pre_mixer_norm", "norm", 1.0), ("post_mixer_norm", "post_norm", 1 / 5), ("pre_mlp_norm", "mlp_norm", 1.0),
        ("post_mlp_norm", "mlp_post_norm", 1 / 5**1.5),
    )  # fmt: skip
    return (
        *outer_entries(convert=one_plus),
        *(
            Entry(f"{layer}.{stored}.weight", f"layers.{{i}}.{name}.weight", partial(_offset, by=by), draw_ones)
            for stored, name, by in offsets
        ),
        Entry(f"{mixer}.in_proj.weight", f"{target}.in_proj.weight", partial(_gate_first, heads=sizes.mamba.num_heads)),
        Entry(f"{mixer}.conv1d.weight", f"{target}.conv1d.weight", filters),
        Entry(f"{mixer}.bcdt_proj.weight", f"{target}.bcdt_proj.weight"),
        Entry(f"{mixer}.dt_proj.weight", f"{target}.dt_proj.weight"),
        *(
            Entry(f"{mixer}.{name}_norm_weight", f"{target}.{name}_norm.weight", draw=draw_ones)
            for name in ("B", "C", "dt")
        ),
        Entry(f"{mixer}.A_log", f"{target}.A", negative_exp, draw_decays),
        Entry(f"{mixer}.D", f"{target}.D", draw=draw_ones),
        Entry(f"{mixer}.dt_bias", f"{target}.dt_bias", draw=draw_steps),
        Entry(f"{mixer}.out_proj.weight", f"{target}.out_proj.weight"),
        Entry(f"{mixer}.qkv_proj.weight", f"{target}.qkv.weight"),
        Entry(f"{mixer}.o_proj.weight", f"{target}.o_proj.weight"),
        Entry(f"{mixer}.q_weight", f"{target}.q_norm.weight", Tensor.flatten, draw_ones),
        Entry(f"{mixer}.k_weight", f"{target}.k_norm.weight", Tensor.flatten, draw_ones),
        Entry(f"{layer}.mlp.gate_up_proj.weight", "layers.{i}.mlp.w_in.weight"),
        Entry(f"{layer}.mlp.down_proj.weight", "layers.{i}.mlp.w_out.weight"),
    )  # fmt: skip


PLAMO2 = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=TIED,
    tied_default=True,
)
