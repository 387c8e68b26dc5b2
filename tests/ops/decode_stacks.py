"""Small random stacks for the compiled decode step, and the same step composed of the reference operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear as _plain_linear

from recurra.ops.conv1d import reference as conv1d
from recurra.ops.decode_stack import Mamba1Weights, Mamba2Weights, StackWeights
from recurra.ops.norm import reference as norm
from recurra.ops.ssm import reference as ssm

States = tuple[tuple[Tensor, Tensor], ...]

#: ``x @ weight.T + bias``, its sums in some order.
LinearOrder = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def shuffled_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same product with its sums in a random order: as right as any other in a given format."""
    order = torch.randperm(x.shape[-1])
    return _plain_linear(x[..., order].contiguous(), weight[..., order].contiguous(), bias)


def _matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn(rows, columns) / columns**0.5).to(dtype)


def _maybe(present: bool, size: int) -> Tensor | None:
    return torch.randn(size) if present else None


def mamba1_block(
    hidden: int, inner: int, N: int, rank: int, W: int, dtype: torch.dtype, *, bias: bool, falcon: bool
) -> Mamba1Weights:
    return Mamba1Weights(
        norm=1 + 0.1 * torch.randn(hidden),
        norm_eps=1e-5,
        in_proj=_matrix(2 * inner, hidden, dtype),
        in_proj_bias=_maybe(bias, 2 * inner),
        conv_weight=torch.randn(inner, W),
        conv_bias=_maybe(bias, inner),
        x_proj=_matrix(rank + 2 * N, inner, dtype) * 4,
        dt_proj=_matrix(inner, rank, dtype),
        dt_bias=torch.empty(inner).uniform_(-4, -1),
        A=-torch.exp(torch.randn(inner, N) - 2),
        D=torch.randn(inner),
        out_proj=_matrix(hidden, inner, dtype),
        out_proj_bias=_maybe(bias, hidden),
        bcdt_norm_eps=1e-6 if falcon else None,
    )


def mamba2_block(
    hidden: int, H: int, P: int, G: int, N: int, W: int, dtype: torch.dtype, *, bias: bool, group: int
) -> Mamba2Weights:
    conv, inner = H * P + 2 * G * N, H * P
    return Mamba2Weights(
        norm=1 + 0.1 * torch.randn(hidden),
        norm_eps=1e-5,
        in_proj=_matrix(inner + conv + H, hidden, dtype),
        in_proj_bias=_maybe(bias, inner + conv + H),
        conv_weight=torch.randn(conv, W),
        conv_bias=_maybe(bias, conv),
        dt_bias=torch.empty(H).uniform_(-4, -1),
        A=-torch.exp(torch.randn(H) - 2),
        D=torch.randn(H),
        dt_limit=(0.02, 0.5) if bias else (0.0, float("inf")),
        gated_norm=1 + 0.1 * torch.randn(inner),
        gated_norm_eps=1e-5,
        gated_norm_group=group,
        out_proj=_matrix(hidden, inner, dtype),
        out_proj_bias=_maybe(bias, hidden),
        num_heads=H,
        head_dim=P,
        num_groups=G,
        state_size=N,
    )


def stack(
    make: Callable[[], Mamba1Weights | Mamba2Weights], blocks: int, hidden: int, dtype: torch.dtype
) -> StackWeights:
    return StackWeights(
        embedding=torch.randn(29, hidden).to(dtype),
        blocks=tuple(make() for _ in range(blocks)),
        final_norm=1 + 0.1 * torch.randn(hidden),
        final_norm_eps=1e-5,
    )


def state_shapes(block: Mamba1Weights | Mamba2Weights) -> tuple[tuple[int, ...], tuple[int, ...]]:
    conv = (block.conv_weight.shape[0], block.conv_weight.shape[1] - 1)
    if isinstance(block, Mamba1Weights):
        return conv, tuple(block.A.shape)
    return conv, (block.num_heads, block.head_dim, block.state_size)


def pool(weights: StackWeights, num_slots: int, used: list[int]) -> States:
    """Views of one row a slot, as the engine's pool has them; free slots are NaN."""
    shapes = [shape for block in weights.blocks for shape in state_shapes(block)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    rows = torch.full((num_slots, sum(sizes) + 3), float("nan"))
    for slot in used:
        rows[slot] = torch.randn(rows.shape[1])
    views, at = [], 0
    for shape, size in zip(shapes, sizes, strict=True):
        views.append(rows[:, at : at + size].unflatten(1, shape))
        at += size
    return tuple(zip(views[0::2], views[1::2], strict=True))


def copy(states: States, dtype: torch.dtype = torch.float32) -> States:
    return tuple((conv.to(dtype, copy=True), ssm.to(dtype, copy=True)) for conv, ssm in states)


def _wide(thing: Any, dtype: torch.dtype) -> Any:
    """A dataclass of weights with every tensor in ``dtype``."""
    values = {}
    for field in dataclasses.fields(thing):
        value = getattr(thing, field.name)
        values[field.name] = value.to(dtype) if isinstance(value, Tensor) else value
    return type(thing)(**values)


def _mamba1(
    w: Mamba1Weights, x: Tensor, conv: Tensor, state: Tensor, slots: Tensor, linear: LinearOrder
) -> Tensor:
    inner, N = w.A.shape
    rank = w.dt_proj.shape[1]
    u, z = linear(x, w.in_proj, w.in_proj_bias).split([inner, inner], dim=-1)
    u = conv1d.causal_conv1d_update(u, w.conv_weight, w.conv_bias, conv, slots, silu=True)
    dt, B, C = linear(u, w.x_proj, None).split([rank, N, N], dim=-1)
    if w.bcdt_norm_eps is not None:
        dt, B, C = (norm.rms_norm(t, None, w.bcdt_norm_eps) for t in (dt, B, C))
    y = ssm.selective_state_update(
        state, u, linear(dt, w.dt_proj, None), w.A, B, C, w.D, z, w.dt_bias, slots, dt_softplus=True
    )
    return linear(y, w.out_proj, w.out_proj_bias)


def _mamba2(
    w: Mamba2Weights, x: Tensor, conv: Tensor, state: Tensor, slots: Tensor, linear: LinearOrder
) -> Tensor:
    inner, shared = w.num_heads * w.head_dim, w.num_groups * w.state_size
    z, u, dt = linear(x, w.in_proj, w.in_proj_bias).split([inner, inner + 2 * shared, w.num_heads], dim=-1)
    u = conv1d.causal_conv1d_update(u, w.conv_weight, w.conv_bias, conv, slots, silu=True)
    u, B, C = u.split([inner, shared, shared], dim=-1)
    heads, groups = (w.num_heads, w.head_dim), (w.num_groups, w.state_size)
    y = ssm.selective_state_update(
        state, u.unflatten(1, heads), dt, w.A, B.unflatten(1, groups), C.unflatten(1, groups), w.D, None,
        w.dt_bias, slots, dt_softplus=True, dt_limit=w.dt_limit,
    ).flatten(1)  # fmt: skip
    y = norm.rms_norm_gated(y, z, w.gated_norm, w.gated_norm_eps, w.gated_norm_group)
    return linear(y, w.out_proj, w.out_proj_bias)


def compose(
    weights: StackWeights,
    states: States,
    ids: Tensor,
    slots: Tensor,
    dtype: torch.dtype,
    linear: LinearOrder = _plain_linear,
) -> Tensor:
    """The step, operator by operator, everything in ``dtype``; states (in ``dtype``) are updated in place."""
    x = weights.embedding.to(dtype)[ids]
    for block, (conv, state) in zip(weights.blocks, states, strict=True):
        w = _wide(block, dtype)
        mixer = _mamba1 if isinstance(block, Mamba1Weights) else _mamba2
        x = x + mixer(w, norm.rms_norm(x, w.norm, w.norm_eps), conv, state, slots, linear)
    return norm.rms_norm(x, weights.final_norm.to(dtype), weights.final_norm_eps)
