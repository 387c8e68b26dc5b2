"""vLLM's ``model_executor.layers.mamba.ops``: packed sequences, states by slot.

Its block-aligned state cache (arguments ``block_idx_*``, ``initial_state_idx``, ``num_computed_tokens``,
``block_size_to_align``) is refused: see docs/decisions for how states at chosen positions are kept here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recurra.errors import RefusedArgumentError
from recurra.ops.compat import ssm
from recurra.ops.compat.calls import (
    CHUNK,
    applies_silu,
    bounds,
    chunks_of,
    dense,
    int32,
    operator,
    refuse_given,
    refuse_gradients,
)
from recurra.ops.compat.conv import check_width
from recurra.ops.compat.norm import rms_norm_gated
from recurra.ops.compat.ssm import mamba_chunk_scan_combined_varlen
from recurra.ops.precision import wide
from recurra.ops.rounding import NEAREST, stochastic

__all__ = [
    "PAD_SLOT_ID",
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "mamba_chunk_scan_combined_varlen",
    "rms_norm_gated",
    "selective_scan_fn",
    "selective_state_update",
]

PAD_SLOT_ID = -1
_BLOCKS = "vLLM's block-aligned state cache is not served."


def _live(slots: Tensor, pad: int, null: int | None) -> Tensor:
    live = (slots >= 0) & (slots != pad)
    return live if null is None else live & (slots != null)


def _marked(slots: Tensor, pad: int, null: int | None) -> Tensor:
    """Slots with every kind of padding as -1."""
    return torch.where(_live(slots, pad, null), slots, -1).to(torch.int32)


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str | bool | None = "silu",
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int | None = None,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    num_computed_tokens: Tensor | None = None,
    block_size_to_align: int | None = None,
    metadata: Any = None,
    validate_data: bool = False,
) -> Tensor:
    """Causal convolution of packed sequences, windows by slot.

    Args:
        x: (channels, T), any strides.
        weight: (channels, W). bias: (channels,) or None.
        conv_states: (entries, channels, L), L at least W - 1, any strides; the first W - 1 places are read and
            **written in place**.
        query_start_loc: (S + 1,) int32. cache_indices: (S,) int32 or None for row s in entry s.
        has_initial_state: (S,) bool or None for no windows.
        pad_slot_id, null_block_id: entries that mark padding; its outputs are zeros.
        metadata, validate_data: not needed, and not read.

    Returns:
        (channels, T) in x's dtype.

    Raises:
        RefusedArgumentError: a width or activation that isn't served, the block-aligned cache; gradients.
    """
    del metadata, validate_data
    name = "causal_conv1d_fn"
    refuse_gradients(name, x=x, weight=weight, bias=bias, conv_states=conv_states)
    refuse_given(
        name, _BLOCKS, block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token, initial_state_idx=initial_state_idx,
        num_computed_tokens=num_computed_tokens, block_size_to_align=block_size_to_align or None,
    )  # fmt: skip
    check_width(name, weight)
    silu, taps = applies_silu(name, activation), weight.shape[1] - 1
    lengths: list[int] = query_start_loc.diff().tolist()
    count = len(lengths)
    entries = torch.arange(count, device=x.device) if cache_indices is None else cache_indices
    if entries.dim() != 1:
        raise RefusedArgumentError(name, "cache_indices", _BLOCKS, "Pass one entry a sequence.")
    live = _live(entries, pad_slot_id, null_block_id) & (query_start_loc.diff() > 0)
    kept = entries[live].long()
    windows = torch.zeros(count + 1, weight.shape[0], taps, dtype=conv_states.dtype, device=x.device)
    windows[1:][live] = conv_states[kept, :, :taps]
    known = torch.zeros(count, dtype=torch.bool, device=x.device)
    if has_initial_state is not None:
        known = has_initial_state.bool() & live
    y: Tensor = operator("causal_conv1d_varlen", x)(
        dense(x.t()), dense(weight), bias, windows, bounds(lengths, x.device), int32(range(1, count + 1), x.device),
        known, chunks_of(lengths, CHUNK, x.device), silu=silu,
    )  # fmt: skip
    conv_states[kept, :, :taps] = windows[1:][live]
    # Outputs of padding are zeros here, whatever its inputs were.
    dead = (~live).repeat_interleave(query_start_loc.diff().long())
    out = y.t()
    covered = out[:, : dead.shape[0]]
    covered[:, dead] = 0.0
    return out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | bool | None = None,
    conv_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    max_query_len: int = -1,
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    validate_data: bool = False,
) -> Tensor:
    """Convolve the next tokens of each sequence, windows by slot.

    Args:
        x: (S, channels), (S, channels, n), or (T, channels) with ``query_start_loc``.
        conv_state: (entries, channels, L), **written in place**.
        num_accepted_tokens: (S,) int32: the window holds the previous step's tokens, of which these many count (see
            :class:`recurra.ops.several.CausalConv1dUpdateVarlen`).
        query_start_loc: (S + 1,) int32. max_query_len: not needed, and not read.
        pad_slot_id, null_block_id: entries that mark padding; its outputs are zeros.

    Returns:
        like x.

    Raises:
        RefusedArgumentError: a width or activation that isn't served, the block-aligned cache; gradients.
    """
    del max_query_len, validate_data
    name = "causal_conv1d_update"
    refuse_gradients(name, x=x, conv_state=conv_state, weight=weight, bias=bias)
    refuse_given(
        name, _BLOCKS, block_idx_last_scheduled_token=block_idx_last_scheduled_token,
        initial_state_idx=initial_state_idx,
    )  # fmt: skip
    check_width(name, weight)
    rows, cu = x, query_start_loc
    if query_start_loc is None:
        tokens = x[..., None] if x.dim() == 2 else x
        rows = tokens.transpose(1, 2).flatten(0, 1)
        cu = torch.arange(x.shape[0] + 1, device=x.device) * tokens.shape[2]
    assert cu is not None
    entries = (
        torch.arange(cu.shape[0] - 1, device=x.device) if conv_state_indices is None else conv_state_indices
    )
    if entries.dim() == 2:
        entries = entries[:, 0]
    marked = _marked(entries[: cu.shape[0] - 1], pad_slot_id, null_block_id)
    length = conv_state.shape[2]
    # Without accepted counts vLLM keeps the window in the first W - 1 places of a longer state.
    window = conv_state if num_accepted_tokens is not None else conv_state[:, :, : weight.shape[1] - 1]
    y: Tensor = operator("causal_conv1d_update_varlen", x)(
        dense(rows), dense(weight), bias, window if length else conv_state, int32(cu, x.device), marked, marked,
        None if num_accepted_tokens is None else int32(num_accepted_tokens, x.device),
        silu=applies_silu(name, activation), pad_slot=-1,
    )  # fmt: skip
    if query_start_loc is not None:
        return y
    out = y.view(x.shape[0], -1, x.shape[1]).transpose(1, 2)
    return out[..., 0] if x.dim() == 2 else out


def selective_scan_fn(
    u: Tensor,
    ssm_states: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    cache_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    null_block_id: int | None = None,
    block_size: int | None = None,
    block_idx_first_scheduled_token: Tensor | None = None,
    block_idx_last_scheduled_token: Tensor | None = None,
    initial_state_idx: Tensor | None = None,
    cu_chunk_seqlen: Tensor | None = None,
    last_chunk_indices: Tensor | None = None,
) -> Tensor:
    """Mamba-1's scan over packed sequences, states by slot.

    Args:
        u: (channels, T), or (S, channels, length) without ``query_start_loc``. delta, z: like u.
        ssm_states: (entries, channels, N), **written in place**.
        A: (channels, N), real. B, C: (groups, N, T), or (S, groups, N, length), or either without groups.
        D, delta_bias: (channels,) or None.
        query_start_loc, cache_indices, has_initial_state, pad_slot_id, null_block_id: as in
            :func:`causal_conv1d_fn`.

    Returns:
        like u.

    Raises:
        RefusedArgumentError: complex A, the block-aligned cache; gradients.
    """
    name = "selective_scan_fn"
    ssm.refuse_complex(name, A=A, B=B, C=C)
    refuse_gradients(
        name, u=u, ssm_states=ssm_states, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias
    )
    refuse_given(
        name, _BLOCKS, block_idx_first_scheduled_token=block_idx_first_scheduled_token,
        block_idx_last_scheduled_token=block_idx_last_scheduled_token, initial_state_idx=initial_state_idx,
        cu_chunk_seqlen=cu_chunk_seqlen, last_chunk_indices=last_chunk_indices,
    )  # fmt: skip
    del block_size  # of the cache that is refused
    batched = query_start_loc is None
    cu = (
        torch.arange(u.shape[0] + 1, device=u.device) * u.shape[2]
        if query_start_loc is None
        else query_start_loc
    )
    lengths: list[int] = cu.diff().tolist()
    flat = {
        key: None if t is None else (t.transpose(1, 2).flatten(0, 1) if batched else t.t())
        for key, t in (("u", u), ("delta", delta), ("z", z))
    }
    keys = {key: _by_token(t, batched) for key, t in (("B", B), ("C", C))}
    rows, groups = keys["B"].shape[0], keys["B"].shape[1]
    count, (channels, size), exact = len(lengths), A.shape, wide(u, A)
    entries = torch.arange(count, device=u.device) if cache_indices is None else cache_indices
    live = _live(entries, pad_slot_id, null_block_id) & (cu.diff() > 0)
    kept = entries[live].long()
    known = live & (has_initial_state.bool() if has_initial_state is not None else torch.zeros_like(live))
    out = torch.zeros(rows, channels, dtype=u.dtype, device=u.device)
    if channels % groups:
        raise RefusedArgumentError(
            name, "B", f"{groups} groups don't divide {channels} channels.", "Use a divisor."
        )
    for g in range(groups):
        mine = slice(g * channels // groups, (g + 1) * channels // groups)
        states = torch.zeros(count + 1, mine.stop - mine.start, size, dtype=exact, device=u.device)
        states[1:][live] = ssm_states[kept, mine].to(exact)
        x, dt, gate = (None if t is None else dense(t[:, mine]) for t in flat.values())
        out[:, mine] = operator("selective_scan_varlen", u)(
            x, dt, A[mine].to(exact), *(dense(keys[key][:, g].to(u.dtype)) for key in "BC"),
            None if D is None else D[mine].to(exact), gate, None if delta_bias is None else delta_bias[mine].to(exact),
            states, bounds(lengths, u.device), int32(range(1, count + 1), u.device), known,
            chunks_of(lengths, CHUNK, u.device), dt_softplus=delta_softplus,
        )  # fmt: skip
        ssm_states[kept, mine] = states[1:][live].to(ssm_states.dtype)
    dead = (~live).repeat_interleave(cu.diff().long())
    out[: dead.shape[0]][dead] = 0.0
    return out.view(count, -1, channels).transpose(1, 2) if batched else out.t()


def _by_token(value: Tensor, batched: bool) -> Tensor:
    """B or C as (T, groups, N)."""
    if batched:
        grouped = value if value.dim() == 4 else value[:, None]
        return grouped.permute(0, 3, 1, 2).flatten(0, 1)
    return (value if value.dim() == 3 else value[None]).permute(2, 0, 1)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    dst_state_batch_indices: Tensor | None = None,
    pad_slot_id: int = PAD_SLOT_ID,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    is_blackwell: bool = False,
    enable_stochastic_rounding: bool = False,
    cache_philox_rounds: int = 0,
    null_block_id: int | None = None,
) -> Tensor:
    """:func:`recurra.ops.compat.ssm.selective_state_update` with vLLM's further arguments.

    Args:
        enable_stochastic_rounding, cache_philox_rounds: how states of 16 bits are rounded; the seed is drawn from
            torch's generator at each call, on the host.
        is_blackwell: a hint for other kernels, not read.
        null_block_id: marks padding as well.

    Raises:
        RefusedArgumentError: as there.
    """
    del is_blackwell
    rounding = NEAREST
    if enable_stochastic_rounding:
        seed = int(torch.randint(2**62, ()))
        rounding = stochastic(seed, state.device, cache_philox_rounds)
    sources, targets = (
        t if t is None or null_block_id is None else torch.where(t == null_block_id, -1, t)
        for t in (state_batch_indices, dst_state_batch_indices)
    )
    return ssm.selective_state_update(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, sources, targets, pad_slot_id, out, num_accepted_tokens,
        cu_seqlens, rounding=rounding,
    )  # fmt: skip
