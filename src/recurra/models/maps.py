"""Pieces of checkpoint maps that many families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from recurra.layers.attention import AttentionSizes
from recurra.layers.delta import DeltaSizes
from recurra.layers.latent import LatentSizes
from recurra.models.weights import (
    LAYER,
    Either,
    Entry,
    Map,
    Rows,
    as_is,
    draw_ones,
    draw_steps,
    draw_zeros,
    filters,
    negative_exp,
)


def draw_decays(value: torch.Tensor, generator: torch.Generator) -> None:
    """A uniform in (-16, -1)."""
    value.uniform_(-16.0, -1.0, generator=generator)


def draw_powers(value: torch.Tensor, generator: torch.Generator) -> None:
    """A = -1 ... -N in every channel."""
    value.copy_(-torch.arange(1, value.shape[1] + 1, device=value.device).expand_as(value))


def at(layers: Iterable[int], entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The entries for these layers alone: for layers of several kinds whose parameters have the same paths."""
    return tuple(
        replace(entry, stored=entry.stored.replace(LAYER, str(i)), target=entry.target.replace(LAYER, str(i)))
        for i in layers
        for entry in entries
    )


def attention_entries(
    sizes: AttentionSizes,
    stored: str,
    target: str,
    *,
    out: str = "o_proj",
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    norm: Callable[[torch.Tensor], torch.Tensor] = as_is,
) -> tuple[Entry, ...]:
    """Separate q, k and v projections into the rows of one, the output projection, and norms by head.

    Args:
        stored: prefix of the names in the checkpoint, such as ``model.layers.{i}.self_attn``.
        target: path of the :class:`recurra.layers.attention.Attention`, such as ``layers.{i}.mixer``.
        out: name of the output projection in the checkpoint; ``norms`` of the norms.
        norm: from their stored weights to what they multiply by.
    """
    q, kv = sizes.q_rows, sizes.kv_rows
    places = (("q_proj", Rows(0, q)), ("k_proj", Rows(q, kv)), ("v_proj", Rows(q + kv, kv)))
    found = [Entry(f"{stored}.{name}.weight", f"{target}.qkv.weight", part=place) for name, place in places]
    found += [
        Entry(f"{stored}.{name}.bias", f"{target}.qkv.bias", draw=draw_zeros, part=place)
        for name, place in places
    ]
    found += [
        Entry(f"{stored}.{out}.weight", f"{target}.o_proj.weight"),
        Entry(f"{stored}.{out}.bias", f"{target}.o_proj.bias", draw=draw_zeros),
        Entry(f"{stored}.{norms[0]}.weight", f"{target}.q_norm.weight", norm, draw_ones),
        Entry(f"{stored}.{norms[1]}.weight", f"{target}.k_norm.weight", norm, draw_ones),
    ]
    return tuple(found)


def gated_mlp_entries(
    inner: int, stored: str, target: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
) -> tuple[Entry, ...]:
    """Gate and up projections into the halves of one, and the down projection; biases where there are any.

    Args:
        inner: rows of the gate.
        stored, target: prefixes of names in the checkpoint and of the :class:`recurra.layers.mlp.GatedMLP`.
        names: of gate, up and down in the checkpoint.
    """
    gate, up, down = names
    places = ((gate, Rows(0, inner)), (up, Rows(inner, inner)))
    return (
        *(Entry(f"{stored}.{name}.weight", f"{target}.w_in.weight", part=place) for name, place in places),
        *(
            Entry(f"{stored}.{name}.bias", f"{target}.w_in.bias", draw=draw_zeros, part=place)
            for name, place in places
        ),
        Entry(f"{stored}.{down}.weight", f"{target}.w_out.weight"),
        Entry(f"{stored}.{down}.bias", f"{target}.w_out.bias", draw=draw_zeros),
    )


def expert_entries(
    stored: str,
    target: str,
    inner: int,
    *,
    gated: bool = True,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Map:
    """Routed experts, each in tensors of its own or all stacked, as ``experts.{e}.up_proj.weight`` or ``experts.up_proj``.

    Args:
        stored, target: prefixes of names in the checkpoint, such as ``model.layers.{i}.mlp.experts``, and of the
            :class:`recurra.layers.moe.MoE`.
        inner: width of an expert.
        gated: whether experts have a gate; stacked ones keep it before the other rows, in ``gate_up_proj``.
        names: of gate, up and down in the checkpoint.
    """
    gate, up, down = names
    rows = ((gate, Rows(0, inner)), (up, Rows(inner, inner))) if gated else ((up, Rows(0, inner)),)
    one = [Entry(f"{stored}.{{e}}.{name}.weight", f"{target}.w_in", part=place) for name, place in rows]
    one.append(Entry(f"{stored}.{{e}}.{down}.weight", f"{target}.w_out"))
    stacked_in = f"{stored}.gate_up_proj" if gated else f"{stored}.{up}"
    stacked = (Entry(stacked_in, f"{target}.w_in"), Entry(f"{stored}.{down}", f"{target}.w_out"))
    return (Either((tuple(one), stacked)),)


def mamba1_entries(stored: str, target: str) -> tuple[Entry, ...]:
    """A Mamba mixer as transformers stores it.

    Args:
        stored, target: prefixes of names in the checkpoint and of the :class:`recurra.layers.mamba1.MambaMixer`.
    """
    return (
        Entry(f"{stored}.in_proj.weight", f"{target}.in_proj.weight"),
        Entry(f"{stored}.in_proj.bias", f"{target}.in_proj.bias", draw=draw_zeros),
        Entry(f"{stored}.conv1d.weight", f"{target}.conv1d.weight", filters),
        Entry(f"{stored}.conv1d.bias", f"{target}.conv1d.bias", draw=draw_zeros),
        Entry(f"{stored}.x_proj.weight", f"{target}.x_proj.weight"),
        Entry(f"{stored}.dt_proj.weight", f"{target}.dt_proj.weight"),
        Entry(f"{stored}.dt_proj.bias", f"{target}.dt_bias", draw=draw_steps),
        Entry(f"{stored}.dt_layernorm.weight", f"{target}.dt_norm", draw=draw_ones),
        Entry(f"{stored}.b_layernorm.weight", f"{target}.B_norm", draw=draw_ones),
        Entry(f"{stored}.c_layernorm.weight", f"{target}.C_norm", draw=draw_ones),
        Entry(f"{stored}.A_log", f"{target}.A", negative_exp, draw_powers),
        Entry(f"{stored}.D", f"{target}.D", draw=draw_ones),
        Entry(f"{stored}.out_proj.weight", f"{target}.out_proj.weight"),
        Entry(f"{stored}.out_proj.bias", f"{target}.out_proj.bias", draw=draw_zeros),
    )


def mamba2_entries(stored: str, target: str) -> tuple[Entry, ...]:
    """A Mamba-2 mixer as transformers stores it.

    Args:
        stored, target: prefixes of names in the checkpoint and of the :class:`recurra.layers.mamba2.MambaMixer2`.
    """
    return (
        Entry(f"{stored}.in_proj.weight", f"{target}.in_proj.weight"),
        Entry(f"{stored}.in_proj.bias", f"{target}.in_proj.bias", draw=draw_zeros),
        Entry(f"{stored}.conv1d.weight", f"{target}.conv1d.weight", filters),
        Entry(f"{stored}.conv1d.bias", f"{target}.conv1d.bias", draw=draw_zeros),
        Entry(f"{stored}.A_log", f"{target}.A", negative_exp, draw_decays),
        Entry(f"{stored}.D", f"{target}.D", draw=draw_ones),
        Entry(f"{stored}.dt_bias", f"{target}.dt_bias", draw=draw_steps),
        Entry(f"{stored}.norm.weight", f"{target}.norm.weight", draw=draw_ones),
        Entry(f"{stored}.out_proj.weight", f"{target}.out_proj.weight"),
        Entry(f"{stored}.out_proj.bias", f"{target}.out_proj.bias", draw=draw_zeros),
    )


def side_by_side(stored: str, target: str, parts: Iterable[tuple[str, int]]) -> tuple[Entry, ...]:
    """Projections that become the rows of one, in this order.

    Args:
        stored: prefix of the names in the checkpoint; ``target``: path of the weight.
        parts: name and rows of each projection.
    """
    found, first = [], 0
    for name, count in parts:
        found.append(Entry(f"{stored}.{name}.weight", target, part=Rows(first, count)))
        first += count
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Regroup:
    """Rows that are stored group by group, each group with ``counts`` rows of several kinds, to kind by kind."""

    groups: int
    counts: tuple[int, ...]

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        if value.shape[0] != self.groups * sum(self.counts):
            return value  # the loader complains about its shape
        grouped = value.view(self.groups, sum(self.counts), *value.shape[1:])
        kinds = torch.split(grouped, list(self.counts), dim=1)
        return torch.cat([kind.flatten(0, 1) for kind in kinds])


@dataclass(frozen=True, slots=True)
class Repeat:
    """A vector of one head to the same for each of ``heads``."""

    heads: int

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        return value.repeat(self.heads) if value.dim() == 1 else value


def head_decays(value: torch.Tensor) -> torch.Tensor:
    """A = -exp(A_log), one a head however many dimensions of one it is stored with."""
    return negative_exp(value.flatten())


def delta_entries(
    sizes: DeltaSizes, stored: str, target: str, *, norm: str = "norm", out: str = "out_proj"
) -> Map:
    """A delta mixer but for its projections of the input; the filters of q, k and v stacked or apart.

    transformers 5.24 stacks filters, and cuts them into thirds again when it saves, whatever their sizes.

    Args:
        stored, target: prefixes of names in the checkpoint and of the :class:`recurra.layers.delta.DeltaMixer`.
        norm, out: names of the gated norm and the output projection in the checkpoint.
    """
    filter_ = f"{target}.conv1d.weight"
    third = -(-sizes.conv_channels // 3)
    stacked = (Entry(f"{stored}.conv1d.weight", filter_, filters),)
    apart = _filters_apart(stored, filter_, (sizes.keys, sizes.keys, sizes.values))
    thirds = _filters_apart(stored, filter_, (third, third, sizes.conv_channels - 2 * third))
    return (
        Either((stacked, apart, thirds)),
        Entry(f"{stored}.A_log", f"{target}.A", head_decays, draw_decays),
        Entry(f"{stored}.dt_bias", f"{target}.dt_bias", draw=draw_steps),
        Entry(f"{stored}.{norm}.weight", f"{target}.norm.weight", Repeat(sizes.value_heads), draw_ones),
        Entry(f"{stored}.{out}.weight", f"{target}.out_proj.weight"),
    )


def _filters_apart(stored: str, target: str, rows: tuple[int, int, int]) -> tuple[Entry, ...]:
    names = ("q_conv1d", "k_conv1d", "v_conv1d")
    parts = side_by_side(stored, target, zip(names, rows, strict=True))
    return tuple(replace(entry, convert=filters) for entry in parts)


def latent_entries(sizes: LatentSizes, stored: str, target: str, *, out: str = "o_proj") -> tuple[Entry, ...]:
    """Latent attention as DeepSeek's and its relatives' checkpoints store it.

    Args:
        stored, target: prefixes of names in the checkpoint and of the
            :class:`recurra.layers.latent.LatentAttention`.
        out: name of the output projection in the checkpoint.
    """
    queries = "q_b_proj" if sizes.query_rank else "q_proj"
    places = (
        ("q_a_proj", "q_down"), (queries, "q_proj"), ("kv_a_proj_with_mqa", "kv_down"), ("kv_b_proj", "kv_up"),
        (out, "o_proj"), ("g_proj", "gate"),
    )  # fmt: skip
    return (
        *(Entry(f"{stored}.{name}.weight", f"{target}.{path}.weight") for name, path in places),
        *(Entry(f"{stored}.{name}.bias", f"{target}.{path}.bias", draw=draw_zeros) for name, path in places),
        Entry(f"{stored}.q_a_layernorm.weight", f"{target}.q_norm.weight", draw=draw_ones),
        Entry(f"{stored}.kv_a_layernorm.weight", f"{target}.kv_norm.weight", draw=draw_ones),
    )
