"""Nemotron-H: every layer is one thing alone, Mamba-2, attention, an MLP or experts, and may have sizes of its own.

    x += part(norm(x))

In "puzzle" checkpoints ``block_configs`` gives each layer its kind and whatever of its numbers differ. Sources:
Nemotron-H (NVIDIA, 2025); Nemotron 3 for experts that work in a narrower space (``moe_latent_size``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from recurra.layers.attention import Attention, AttentionSizes
from recurra.layers.dtypes import parameter
from recurra.layers.linear import Linear
from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.layers.mlp import ACTIVATIONS, MLP
from recurra.layers.moe import Routing, route
from recurra.layers.norm import RMSNorm
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.hybrid import Block, HybridLM, outer_entries
from recurra.models.maps import attention_entries, expert_entries, mamba2_entries
from recurra.models.weights import Either, Entry, Map, draw_ones, draw_zeros

#: Kinds of layers, by every word and letter that files have for them.
KINDS = {
    "mamba": "mamba", "linear_attention": "mamba", "M": "mamba",
    "attention": "attention", "full_attention": "attention", "*": "attention",
    "mlp": "mlp", "-": "mlp", "moe": "moe", "E": "moe",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MLPSizes:
    """An MLP without a gate."""

    hidden: int
    inner: int
    activation: str
    bias: bool


@dataclass(frozen=True, slots=True)
class ExpertsSizes:
    """Routed experts and a shared one. ``latent``: width of the routed ones' input and output; None: the model's."""

    shared: MLPSizes
    inner: int
    num_experts: int
    routing: Routing
    latent: int | None

    @property
    def width(self) -> int:
        return self.latent or self.shared.hidden


LayerSizes = Mamba2Sizes | AttentionSizes | MLPSizes | ExpertsSizes


@dataclass(frozen=True, slots=True)
class NemotronSizes:
    """Each layer's numbers, whose type is its kind."""

    layers: tuple[LayerSizes, ...]


def adapt(fields: Fields) -> Fields:
    """Count the layers, whose number a file leaves to the list of their kinds."""
    return fields.over({"num_hidden_layers": len(_kinds(fields))})


def _kinds(fields: Fields) -> list[str]:
    """The kind of each layer.

    Raises:
        CheckpointError: no list of kinds, or an unknown one.
    """
    keys = ("block_configs", "layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if fields.raw.get(key)), keys[1])
    listed = fields.raw.get(key)
    if key == keys[0] and isinstance(listed, list):
        listed = [block.get("block_type") if isinstance(block, dict) else None for block in listed]
    if not isinstance(listed, (list, str)):
        raise fields.wrong(key, "must list the kind of each layer.")
    for word in listed:
        if word not in KINDS:
            raise fields.wrong(key, f"{word!r} is unknown. Known: {', '.join(KINDS)}.")
    return [KINDS[word] for word in listed]


def read(fields: Fields) -> NemotronSizes:
    """Numbers from ``NemotronHConfig``, transformers' or NVIDIA's."""
    kinds = _kinds(fields)
    own = fields.raw.get("block_configs") or [{}] * len(kinds)
    readers: dict[str, Callable[[Fields], LayerSizes]]
    readers = {"mamba": _read_mamba, "attention": _read_attention, "mlp": _read_mlp, "moe": _read_experts}
    return NemotronSizes(
        tuple(readers[kind](fields.over(changes)) for kind, changes in zip(kinds, own, strict=True))
    )


def _read_mamba(fields: Fields) -> Mamba2Sizes:
    """A Mamba-2 layer.

    dt is bounded by ``time_step_limit``, as NVIDIA's own code has it. transformers 5.24 bounds it below by
    ``time_step_min`` in prompts and not at all in decoding.
    """
    fields.only({"mamba_hidden_act": ("silu", "swish"), "mamba_proj_bias": (False,)})
    return Mamba2Sizes(
        hidden=fields.whole("hidden_size"),
        num_heads=fields.whole("mamba_num_heads", 128),
        head_dim=fields.whole("mamba_head_dim", 64),
        num_groups=_either(fields, "n_groups", "mamba_n_groups", 8),
        state_size=fields.whole("ssm_state_size", 128),
        conv_kernel=_either(fields, "conv_kernel", "mamba_d_conv", 4),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        use_bias=fields.flag("use_bias", False),
        use_conv_bias=fields.flag(
            "mamba_conv_bias" if "mamba_conv_bias" in fields.raw else "use_conv_bias", True
        ),
        dt_limit=fields.interval("mamba_dt_limit" if "mamba_dt_limit" in fields.raw else "time_step_limit"),
    )


def _either(fields: Fields, key: str, older: str, default: int) -> int:
    return fields.whole(older if older in fields.raw else key, default)


def _read_attention(fields: Fields) -> AttentionSizes:
    fields.only({"attention_bias": (False,), "sliding_window": (None,)})
    heads, head_dim = fields.whole("num_attention_heads", 32), fields.whole("head_dim", 128)
    return AttentionSizes(
        hidden=fields.whole("hidden_size"),
        num_heads=heads,
        num_kv_heads=fields.whole("num_key_value_heads", 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
    )


def _read_mlp(fields: Fields, key: str = "intermediate_size") -> MLPSizes:
    return MLPSizes(
        hidden=fields.whole("hidden_size"),
        inner=fields.whole(key, 21504),
        activation=fields.choice("mlp_hidden_act", ACTIVATIONS, "relu2"),
        bias=fields.flag("mlp_bias", False),
    )


def _read_experts(fields: Fields) -> ExpertsSizes:
    fields.only({"n_shared_experts": (1,)})
    return ExpertsSizes(
        shared=_read_mlp(fields, "moe_shared_expert_intermediate_size"),
        inner=fields.whole("moe_intermediate_size", 7688),
        num_experts=fields.whole("n_routed_experts", 8),
        routing=Routing(
            fields.whole("num_experts_per_tok", 2),
            score="sigmoid",
            renormalise=fields.flag("norm_topk_prob", True),
            eps=1e-20,
            scale=fields.number("routed_scaling_factor", 1.0),
            groups=fields.whole("n_group", 1),
            groups_kept=fields.whole("topk_group", 1),
        ),
        latent=None if fields.raw.get("moe_latent_size") is None else fields.whole("moe_latent_size"),
    )


def _mlp(sizes: MLPSizes, parts: Build) -> MLP:
    return MLP(sizes.hidden, sizes.inner, activation=sizes.activation, bias=sizes.bias, **parts.tools)


class Experts(nn.Module):
    """A shared MLP beside routed ones, which may work on a projection of the input: (rows, hidden) to the same."""

    def __init__(self, sizes: ExpertsSizes, parts: Build) -> None:
        super().__init__()
        self.sizes, self._expert_mlp = sizes, parts.ops.expert_mlp
        hidden, width, count, device = sizes.shared.hidden, sizes.width, sizes.num_experts, parts.device
        self.router = parameter(count, hidden, dtype=parts.dtypes.recurrence, device=device)
        self.router_bias = parameter(count, dtype=parts.dtypes.recurrence, device=device)
        self.w_in = parameter(count, sizes.inner, width, dtype=parts.dtypes.weight, device=device)
        self.w_out = parameter(count, width, sizes.inner, dtype=parts.dtypes.weight, device=device)
        self.shared = _mlp(sizes.shared, parts)
        self.narrow: nn.Module | None = None
        self.widen: nn.Module | None = None
        if sizes.latent is not None:
            self.narrow = Linear(hidden, width, bias=sizes.shared.bias, **parts.tools)
            self.widen = Linear(width, hidden, bias=sizes.shared.bias, **parts.tools)

    def forward(self, x: Tensor) -> Tensor:
        ids, weights = route(
            F.linear(x.to(self.router.dtype), self.router), self.sizes.routing, self.router_bias
        )
        y: Tensor = x if self.narrow is None else self.narrow(x)
        act = self.sizes.shared.activation
        y = self._expert_mlp(y, self.w_in, self.w_out, ids, weights, activation=act, gated=False)
        if self.widen is not None:
            y = self.widen(y)
        shared: Tensor = self.shared(x)
        return y + shared


def build(config: ModelConfig, parts: Build) -> HybridLM:
    """One part a layer, behind a norm."""
    assert isinstance(config.sizes, NemotronSizes)

    def block(sizes: LayerSizes) -> Block:
        act, norm = parts.dtypes.act, RMSNorm(config.hidden_size, config.norm_eps, **parts.tools)
        if isinstance(sizes, Mamba2Sizes):
            return Block(act, norm=norm, mixer=MambaMixer2(sizes, **parts.tools))
        if isinstance(sizes, AttentionSizes):
            return Block(act, norm=norm, mixer=Attention(sizes, **parts.tools))
        mlp = _mlp(sizes, parts) if isinstance(sizes, MLPSizes) else Experts(sizes, parts)
        return Block(act, mlp_norm=norm, mlp=mlp)

    return HybridLM(config, map(block, config.sizes.layers), parts)


def _mlp_entries(stored: str, target: str) -> Iterator[Entry]:
    for name, own in (("up_proj", "w_in"), ("down_proj", "w_out")):
        yield Entry(f"{stored}.{name}.weight", f"{target}.{own}.weight")
        yield Entry(f"{stored}.{name}.bias", f"{target}.{own}.bias", draw=draw_zeros)


def _experts_entries(sizes: ExpertsSizes, stored: str, target: str) -> Iterator[Entry | Either]:
    yield Entry(f"{stored}.gate.weight", f"{target}.router")
    yield Entry(f"{stored}.gate.e_score_correction_bias", f"{target}.router_bias", draw=draw_zeros)
    yield from expert_entries(f"{stored}.experts", target, sizes.inner, gated=False)
    yield from _mlp_entries(f"{stored}.shared_experts", f"{target}.shared")
    for name, own in (("fc1_latent_proj", "narrow"), ("fc2_latent_proj", "widen")):
        yield Entry(f"{stored}.{name}.weight", f"{target}.{own}.weight")
        yield Entry(f"{stored}.{name}.bias", f"{target}.{own}.bias", draw=draw_zeros)


def _layer_entries(sizes: LayerSizes, i: int) -> Iterator[Entry | Either]:
    """One layer's, by its kind."""
    stored, mixer, mlp = f"backbone.layers.{i}.mixer", f"layers.{i}.mixer", f"layers.{i}.mlp"
    norm = "norm" if isinstance(sizes, (Mamba2Sizes, AttentionSizes)) else "mlp_norm"
    yield Entry(f"backbone.layers.{i}.norm.weight", f"layers.{i}.{norm}.weight", draw=draw_ones)
    if isinstance(sizes, Mamba2Sizes):
        yield from mamba2_entries(stored, mixer)
    elif isinstance(sizes, AttentionSizes):
        yield from attention_entries(sizes, stored, mixer)
    elif isinstance(sizes, MLPSizes):
        yield from _mlp_entries(stored, mlp)
    else:
        yield from _experts_entries(sizes, stored, mlp)


def entries(config: ModelConfig) -> Map:
    """As transformers stores it, layer by layer."""
    assert isinstance(config.sizes, NemotronSizes)
    layers = (entry for i, sizes in enumerate(config.sizes.layers) for entry in _layer_entries(sizes, i))
    return (*outer_entries(norm="backbone.norm_f.weight", embedding="backbone.embeddings.weight"), *layers)


NEMOTRON_H = Family(
    read={Layout.TRANSFORMERS: read},
    build=build,
    entries=entries,
    tied=("lm_head.weight", "backbone.embeddings.weight"),
    tied_default=False,
    adapt=adapt,
    renames=((r"^model\.", "backbone."),),
    skips=(r"mtp\.",),
)
