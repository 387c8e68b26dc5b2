"""mamba_ssm's scans and state update on the packed operators."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.errors import RefusedArgumentError
from recurra.ops.compat import parts
from recurra.ops.compat.calls import (
    CHUNK,
    bounds,
    chunks_of,
    dense,
    first_and_last,
    int32,
    operator,
    pieces,
    refuse_given,
    refuse_gradients,
)
from recurra.ops.precision import wide
from recurra.ops.rounding import NEAREST, Rounding

_NO_LIMIT = (0.0, float("inf"))


def refuse_complex(function: str, **tensors: Tensor | None) -> None:
    """Raises RefusedArgumentError: a complex tensor."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.is_complex():
            raise RefusedArgumentError(
                function, name, f"{tensor.dtype} is not served: the recurrences here are real.",
                "Use a real one, as every published Mamba does.",
            )  # fmt: skip


# --- Mamba-1 -------------------------------------------------------------------------------------


def _by_token(function: str, name: str, value: Tensor, channels: int) -> Tensor:
    """B or C as (batch, length, groups, N)."""
    if value.dim() == 4:
        return value.permute(0, 3, 1, 2)
    if value.dim() == 3:
        return value.transpose(1, 2)[:, :, None]
    raise RefusedArgumentError(
        function, name, f"shape {tuple(value.shape)}: one that doesn't vary with the token is not served.",
        f"Use (batch, N, length) or (batch, groups, N, length); groups divide the {channels} channels.",
    )  # fmt: skip


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba-1's scan over batched sequences (mamba_ssm's function of this name).

    Args:
        u: (batch, channels, length), the convolved input. delta: like u, before bias and softplus.
        A: (channels, N), real. B, C: (batch, N, length) or (batch, groups, N, length).
        D, delta_bias: (channels,) or None. z: like u or None; the result is multiplied by silu(z).
        return_last_state: also return the state after the last token.

    Returns:
        (batch, channels, length) in u's dtype, and with ``return_last_state`` (batch, channels, N) float32.

    Raises:
        RefusedArgumentError: complex A, B or C; B or C that don't vary with the token; gradients.
    """
    name = "selective_scan_fn"
    refuse_complex(name, A=A, B=B, C=C)
    refuse_gradients(name, u=u, delta=delta, A=A, B=B, C=C, D=D, z=z, delta_bias=delta_bias)
    batch, channels, length = u.shape
    by_token = {key: _by_token(name, key, value, channels) for key, value in (("B", B), ("C", C))}
    groups, state_size, exact = by_token["B"].shape[2], A.shape[1], wide(u, A)
    out = torch.empty(batch, length, channels, dtype=u.dtype, device=u.device)
    state = torch.zeros(batch + 1, channels, state_size, dtype=exact, device=u.device)
    where = (
        bounds([length] * batch, u.device), int32(range(1, batch + 1), u.device),
        torch.zeros(batch, dtype=torch.bool, device=u.device), chunks_of([length] * batch, CHUNK, u.device),
    )  # fmt: skip
    for g, mine in enumerate(_slices(channels, groups, name)):
        x, dt, gate = (
            None if t is None else dense(t[:, mine].transpose(1, 2).reshape(batch * length, -1))
            for t in (u, delta, z)
        )
        b, c = (dense(by_token[key][:, :, g].reshape(batch * length, state_size).to(u.dtype)) for key in "BC")
        # States of a group's channels are contiguous only by themselves.
        part = torch.zeros(batch + 1, mine.stop - mine.start, state_size, dtype=exact, device=u.device)
        y = operator("selective_scan_varlen", u)(
            x, dt, A[mine].to(exact), b, c, *(None if t is None else t[mine].to(exact) for t in (D,)), gate,
            None if delta_bias is None else delta_bias[mine].to(exact), part, *where, dt_softplus=delta_softplus,
        )  # fmt: skip
        out[:, :, mine] = y.view(batch, length, -1)
        state[:, mine] = part
    result = out.transpose(1, 2)
    return (result, state[1:]) if return_last_state else result


def _slices(channels: int, groups: int, function: str) -> list[slice]:
    if groups < 1 or channels % groups:
        raise RefusedArgumentError(
            function, "B", f"{groups} groups don't divide {channels} channels.", "Use one of its divisors."
        )
    size = channels // groups
    return [slice(g * size, (g + 1) * size) for g in range(groups)]


# --- the state update ----------------------------------------------------------------------------


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
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    rounding: Rounding = NEAREST,
) -> Tensor:
    """The next step or steps of the recurrence (the function of this name in mamba_ssm and in vLLM).

    Args:
        state: (entries, channels, N) or (entries, H, P, N), **written in place**.
        x: (T, channels) or (T, H, P), a row a sequence, or a row a token with ``cu_seqlens``. dt: like x.
        A: (channels, N) or (H, P, N). B, C: (T, N) or (T, G, N). D, dt_bias: (channels,) or (H, P), or None.
            Mamba-2's dt, A and dt_bias are one number a head, *expanded* (with strides of zero); others are served
            as well, as Mamba-1 in each group.
        z: like x or None; the result is multiplied by silu(z).
        state_batch_indices: (S,) or (S, J) int32, entries that states are read from; None: row s from entry s.
        dst_state_batch_indices: the same, entries that they are written to; None: where they were read.
        pad_slot_id: marks padding in both, as negative numbers do; padding rows give zeros.
        out: like x, written with the result.
        num_accepted_tokens: (S,) int32: the state is read from column ``accepted - 1`` of the indices, and the state
            after token j is written to column j of the others.
        cu_seqlens: (S + 1,) int32, bounds of several tokens a sequence.
        rounding: how states are rounded where they are written.

    Returns:
        like x; ``out`` if it is given.

    Raises:
        RefusedArgumentError: complex A; accepted counts without two-dimensional indices; gradients.
    """
    name = "selective_state_update"
    refuse_complex(name, A=A, B=B, C=C)
    refuse_gradients(name, state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    count = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    every = torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device)
    cu = every if cu_seqlens is None else int32(cu_seqlens, x.device)
    sources, targets = _entries(
        name, count, x.shape[0] if cu_seqlens is not None else 1, cu, state_batch_indices, dst_state_batch_indices,
        num_accepted_tokens, pad_slot_id,
    )  # fmt: skip
    options = {"dt_softplus": dt_softplus, "pad_slot": pad_slot_id, "rounding": rounding}
    y = _update(state, x, dt, A, B, C, D, z, dt_bias, (cu, sources, targets), options)
    return y if out is None else out.copy_(y.view(out.shape))


def _entries(
    function: str,
    count: int,
    longest: int,
    cu_seqlens: Tensor,
    sources: Tensor | None,
    targets: Tensor | None,
    accepted: Tensor | None,
    pad: int,
) -> tuple[Tensor, Tensor]:
    """Sources (S,) and targets (S, J) of the update's contract; nothing is read on the host."""
    device = cu_seqlens.device
    if sources is None:
        sources = torch.arange(count, dtype=torch.int32, device=device)
    read = int32(sources, device).view(sources.shape[0], -1)[:count]
    write = read if targets is None else int32(targets, device).view(targets.shape[0], -1)[:count]
    if accepted is not None:
        if sources.dim() != 2:
            raise RefusedArgumentError(
                function, "num_accepted_tokens", "it picks a column of state_batch_indices.",
                "Pass state_batch_indices of (sequences, tokens).",
            )  # fmt: skip
        column = (accepted.long() - 1).clamp(min=0)[:, None]
        return read.gather(1, column).flatten(), write.contiguous()
    place = torch.arange(longest, device=device)
    last = place[None] == (cu_seqlens.diff() - 1)[:, None]
    return read[:, 0].contiguous(), torch.where(last, write[:, :1], min(pad, -1)).to(torch.int32)


def _one_a_head(value: Tensor, dims: int) -> bool:
    return all(value.stride(-1 - i) == 0 or value.shape[-1 - i] == 1 for i in range(dims))


def _update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    where: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
) -> Tensor:
    run = operator("selective_state_update_varlen", x)
    exact = wide(x, A)
    B, C = dense(B.to(x.dtype)), dense(C.to(x.dtype))
    z = None if z is None else dense(z)
    if state.dim() == 3:
        wide_D, bias = (None if t is None else dense(t.to(exact)) for t in (D, dt_bias))
        y: Tensor = run(
            state, dense(x), dense(dt), dense(A.to(exact)), B.view(B.shape[0], -1), C.view(C.shape[0], -1), wide_D, z,
            bias, *where, **options,
        )  # fmt: skip
        return y
    if dt.dim() == 2 or A.dim() == 1:  # Mamba-2's own shapes
        dt, A = (dt, A) if dt.dim() == 2 else (dt[..., 0], A)
        tied = True
    else:
        tied = _one_a_head(dt, 1) and _one_a_head(A, 2) and (dt_bias is None or _one_a_head(dt_bias, 1))
        if tied:
            dt, A = dt[..., 0], A[..., 0, 0]
    if tied:
        bias = (
            None
            if dt_bias is None
            else (dt_bias[..., 0] if dt_bias.dim() == 2 else dt_bias).to(exact).contiguous()
        )
        skip = None if D is None else D.to(exact).contiguous()
        heads: Tensor = run(
            state, dense(x), dt, A.to(exact).contiguous(), B, C, skip, z, bias, *where, **options
        )
        return heads
    return _update_untied(state, x, dt, A, B, C, D, z, dt_bias, where, options)


def _update_untied(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    where: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
) -> Tensor:
    """Heads whose channels have their own dt and A: each group is a Mamba-1 with its B and C."""
    heads, dim, _ = state.shape[1:]
    groups, exact = B.shape[1], wide(x, A)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for g, mine in enumerate(_slices(heads, groups, "selective_state_update")):
        flat_D, bias = (
            None
            if t is None
            else (t[mine, None].expand(-1, dim) if t.dim() == 1 else t[mine]).to(exact).flatten()
            for t in (D, dt_bias)
        )
        y = operator("selective_state_update_varlen", x)(
            state[:, mine].flatten(1, 2), x[:, mine].flatten(1), dt[:, mine].flatten(1).contiguous(),
            A[mine].to(exact).flatten(0, 1).contiguous(), B[:, g], C[:, g], flat_D,
            None if z is None else z[:, mine].flatten(1), bias, *where, **options,
        )  # fmt: skip
        out[:, mine] = y.unflatten(1, (-1, dim))
    return out


# --- Mamba-2's chunked scan ----------------------------------------------------------------------


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """Mamba-2's scan over batched sequences (mamba_ssm's function of this name).

    Args:
        x: (batch, length, H, P). dt: (batch, length, H), before bias and softplus. A: (H,), real.
        B, C: (batch, length, G, N).
        chunk_size: kernel chunk, in tokens; answers don't depend on it but for rounding.
        D: (H,) or (H, P) or None. z: like x or None; the result is multiplied by silu(z). dt_bias: (H,) or None.
        initial_states: (batch, H, P, N), the state before each row's first token.
        seq_idx: (batch, length) int: several sequences a row; where the number changes the state is zero.
        cu_seqlens: (S + 1,) int32, bounds of the sequences in the only row, for ``return_varlen_states``.
        dt_limit: bounds of dt after softplus.
        return_final_states: also return each row's last state.
        return_varlen_states: also return the state after each sequence of ``cu_seqlens``; needs ``seq_idx`` as well
            if sequences are not to run into each other.

    Returns:
        (batch, length, H, P) in x's dtype, then, as asked for, (batch, H, P, N) and (S, H, P, N), float32.

    Raises:
        RefusedArgumentError: complex A; ``return_varlen_states`` without ``cu_seqlens``, or with several rows;
            gradients.
    """
    name = "mamba_chunk_scan_combined"
    refuse_complex(name, A=A, B=B, C=C)
    refuse_gradients(
        name, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states
    )
    batch, length, heads, dim = x.shape
    if return_varlen_states:
        lengths = _varlen(name, batch, seq_idx, cu_seqlens)
        rows = [0] * len(lengths)
    else:
        refuse_given(name, "it is read for return_varlen_states alone.", cu_seqlens=cu_seqlens)
        lengths, rows = ([length] * batch, list(range(batch))) if seq_idx is None else pieces(seq_idx)
    xs, dts, Bs, Cs = (t.reshape(batch * length, *t.shape[2:]) for t in (x, dt, B, C))
    states = torch.zeros(len(lengths) + 1, heads, dim, B.shape[3], dtype=wide(x, A), device=x.device)
    first, last = first_and_last(rows)
    known = torch.zeros(len(lengths), dtype=torch.bool, device=x.device)
    if initial_states is not None:
        for i in first:
            states[1 + i] = initial_states[rows[i]]
            known[i] = True
    y = scan_packed(
        xs, dts, Bs, Cs, A, D, None if z is None else z.reshape(batch * length, heads, dim), dt_bias, states, lengths, known,
        chunk_size=chunk_size, dt_softplus=dt_softplus, dt_limit=dt_limit,
    )  # fmt: skip
    results = [y.view(x.shape)]
    if return_final_states:
        results.append(states[1:][last])
    if return_varlen_states:
        results.append(states[1:])
    return results[0] if len(results) == 1 else tuple(results)


def _varlen(function: str, batch: int, seq_idx: Tensor | None, cu_seqlens: Tensor | None) -> list[int]:
    if cu_seqlens is None or seq_idx is None:
        raise RefusedArgumentError(
            function, "return_varlen_states", "it needs the sequences' bounds and numbers.",
            "Pass cu_seqlens and seq_idx.",
        )  # fmt: skip
    if batch != 1:
        raise RefusedArgumentError(
            function, "return_varlen_states", f"{batch} rows of packed sequences.", "Pack all into one row."
        )
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


def scan_packed(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    states: Tensor,
    lengths: list[int],
    known: Tensor,
    *,
    chunk_size: int,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> Tensor:
    """Scan packed sequences (T, ...), the states of which are rows 1 on of ``states``, **written in place**.

    Returns:
        (T, H, P) in x's dtype, gated.
    """
    exact = wide(x, A)
    y: Tensor = operator("mamba_chunk_scan_varlen", x)(
        dense(x), dt, A.to(exact).contiguous(), dense(B.to(x.dtype)), dense(C.to(x.dtype)),
        None if D is None else D.to(exact).contiguous(), None if dt_bias is None else dt_bias.to(exact).contiguous(),
        states, bounds(lengths, x.device), int32(range(1, len(lengths) + 1), x.device), known,
        chunks_of(lengths, chunk_size, x.device), dt_softplus=dt_softplus, dt_limit=tuple(dt_limit),
    )  # fmt: skip
    return y if z is None else (y.to(exact) * F.silu(z.to(exact))).to(x.dtype)


def mamba_chunk_scan_combined_varlen(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    cu_seqlens: Tensor,
    cu_chunk_seqlens: Tensor,
    last_chunk_indices: Tensor,
    seq_idx: Tensor,
    out: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
    return_intermediate_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor:
    """Mamba-2's scan over packed sequences (vLLM's function of this name).

    Args:
        x: (T, H, P). dt: (T, H), before bias and softplus. A: (H,), real. B, C: (T, G, N).
        chunk_size: largest chunk, in tokens.
        cu_seqlens: (S + 1,) int32, bounds of the sequences. cu_chunk_seqlens: (chunks + 1,) int32, of the chunks.
        last_chunk_indices: (S,) each sequence's last chunk. seq_idx: (chunks,) each chunk's sequence.
        out: like x, **written** with the result.
        D, z, dt_bias, dt_limit: as in :func:`mamba_chunk_scan_combined`.
        initial_states: (S, H, P, N), the states before the sequences' first tokens; None: zeros.
        return_intermediate_states: return the state after every chunk, not after every sequence.
        state_dtype: of what is returned; None: float32.

    Returns:
        (S, H, P, N), or (chunks, H, P, N) with ``return_intermediate_states``.

    Raises:
        RefusedArgumentError: complex A; gradients.
    """
    name = "mamba_chunk_scan_combined_varlen"
    refuse_complex(name, A=A, B=B, C=C)
    refuse_gradients(
        name, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, initial_states=initial_states
    )
    heads, dim, size, exact = A.shape[0], x.shape[2], B.shape[2], wide(x, A)
    lengths: list[int] = cu_seqlens.diff().tolist()
    known = torch.full((len(lengths),), initial_states is not None, device=x.device)
    states = torch.zeros(len(lengths) + 1, heads, dim, size, dtype=exact, device=x.device)
    if initial_states is not None:
        states[1:] = initial_states
    passed = None
    if return_intermediate_states:
        passed = parts.chunk_states_after(
            x, dt, A, B, dt_bias, states[1:].clone(), cu_chunk_seqlens.tolist(), seq_idx.tolist(), dt_softplus,
            dt_limit,
        )  # fmt: skip
    y = scan_packed(
        x, dt, B, C, A, D, z, dt_bias, states, lengths, known, chunk_size=chunk_size, dt_softplus=dt_softplus,
        dt_limit=dt_limit,
    )  # fmt: skip
    out.copy_(y.view(out.shape))
    result = states[1:] if passed is None else passed
    return result if state_dtype is None else result.to(state_dtype)
