"""causal_conv1d's two functions on the packed operators."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.errors import RefusedArgumentError
from recurra.ops.compat.calls import (
    CHUNK,
    applies_silu,
    bounds,
    chunks_of,
    dense,
    int32,
    operator,
    pieces,
    refuse_gradients,
)


def check_width(function: str, weight: Tensor) -> None:
    """Raises RefusedArgumentError: a width that no backend has."""
    if not 2 <= weight.shape[1] <= 5:
        raise RefusedArgumentError(
            function, "weight", f"width {weight.shape[1]} is not served.", "Use 2 to 5."
        )


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal depthwise convolution of batched sequences (causal_conv1d's function of this name).

    Args:
        x: (batch, channels, length), any strides.
        weight: (channels, W), W from 2 to 5. bias: (channels,) or None.
        seq_idx: (batch, length) int: several sequences a row, numbered; where the number changes the window is
            empty, and outputs of negative numbers are zeros. Not together with initial or final states.
        initial_states: (batch, channels, W - 1), inputs before the first.
        return_final_states: also return the last W - 1 inputs; final_states_out: written with them.
        activation: None, "silu" or "swish".

    Returns:
        (batch, channels, length), and with ``return_final_states`` (batch, channels, W - 1).

    Raises:
        RefusedArgumentError: a width, activation or combination that isn't served; gradients.
    """
    name = "causal_conv1d_fn"
    refuse_gradients(name, x=x, weight=weight, bias=bias, initial_states=initial_states)
    check_width(name, weight)
    silu = applies_silu(name, activation)
    if seq_idx is not None and (initial_states is not None or return_final_states):
        raise RefusedArgumentError(
            name, "seq_idx", "not together with initial_states or return_final_states.", "Pass one of them."
        )
    batch, channels, length = x.shape
    if seq_idx is None:
        lengths = [length] * batch
    else:
        lengths, _ = pieces(seq_idx)
    count, taps = len(lengths), weight.shape[1] - 1
    windows = torch.zeros(count + 1, channels, taps, dtype=x.dtype, device=x.device)
    if initial_states is not None:
        windows[1:] = initial_states.to(x.dtype)
    rows = dense(x.transpose(1, 2).reshape(batch * length, channels))
    y: Tensor = operator("causal_conv1d_varlen", x)(
        rows, dense(weight), bias, windows, bounds(lengths, x.device), int32(range(1, count + 1), x.device),
        torch.full((count,), initial_states is not None, device=x.device), chunks_of(lengths, CHUNK, x.device),
        silu=silu,
    )  # fmt: skip
    out = y.view(batch, length, channels)
    if seq_idx is not None:
        out = out.masked_fill((seq_idx < 0)[..., None], 0.0)
    out = out.transpose(1, 2)
    if not return_final_states:
        return out
    final = windows[1:]
    if length == 0 and initial_states is None:
        final = torch.zeros_like(final)
    if final_states_out is not None:
        final = final_states_out.copy_(final)
    return out, final


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """Convolve the next token or tokens of each sequence (causal_conv1d's function of this name).

    Args:
        x: (batch, channels) or (batch, channels, n).
        conv_state: (entries, channels, L), L at least W - 1, any strides; **written in place**.
        weight, bias, activation: as in :func:`causal_conv1d_fn`.
        cache_seqlens: (batch,) int32: the state is a ring, to be written from place ``cache_seqlens % L`` on.
        conv_state_indices: (batch,) int32, each sequence's entry; negative ones are padding, with outputs of zeros.

    Returns:
        like x.

    Raises:
        RefusedArgumentError: a width or activation that isn't served; gradients.
    """
    name = "causal_conv1d_update"
    refuse_gradients(name, x=x, conv_state=conv_state, weight=weight, bias=bias)
    check_width(name, weight)
    silu = applies_silu(name, activation)
    tokens = x[..., None] if x.dim() == 2 else x
    batch, channels, count = tokens.shape
    slots = (
        torch.arange(batch, dtype=torch.int32, device=x.device)
        if conv_state_indices is None
        else int32(conv_state_indices, x.device)
    )
    rows = dense(tokens.transpose(1, 2).reshape(batch * count, channels))
    windows, written = conv_state, slots
    if cache_seqlens is not None:
        windows, written = _unrolled(conv_state, slots, cache_seqlens, weight.shape[1] - 1)
    y: Tensor = operator("causal_conv1d_update_varlen", x)(
        rows, dense(weight), bias, windows, bounds([count] * batch, x.device), written, written, None, silu=silu,
        pad_slot=-1,
    )  # fmt: skip
    if cache_seqlens is not None:
        _write_ring(conv_state, slots, cache_seqlens, tokens)
    out = y.view(batch, count, channels).transpose(1, 2)
    return out[..., 0] if x.dim() == 2 else out


def _unrolled(ring: Tensor, slots: Tensor, filled: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """The last inputs of each ring in order, a row a sequence, and the rows' numbers (-1 for padding)."""
    place = filled.long()[:, None] - taps + torch.arange(taps, device=ring.device)
    live = slots >= 0
    safe = torch.where(live, slots, 0).long()
    windows = ring[safe].gather(2, (place % ring.shape[2])[:, None].expand(-1, ring.shape[1], -1))
    rows = torch.arange(slots.shape[0], dtype=torch.int32, device=ring.device)
    return windows.contiguous(), torch.where(live, rows, -1)


def _write_ring(ring: Tensor, slots: Tensor, filled: Tensor, tokens: Tensor) -> None:
    """Put the tokens (batch, channels, n) into the rings; only the last L fit."""
    length, count = ring.shape[2], tokens.shape[2]
    first = max(0, count - length)
    live = (slots >= 0).nonzero().flatten()
    place = (filled.long()[:, None] + torch.arange(first, count, device=ring.device)) % length
    ring[slots[live].long()[:, None], :, place[live]] = (
        tokens[live][:, :, first:].transpose(1, 2).to(ring.dtype)
    )
