"""fla's gated delta rule (flash-linear-attention's ``ops.gated_delta_rule`` and ``ops.kda``)."""

from __future__ import annotations

import torch
from torch import Tensor

from recurra.errors import RefusedArgumentError
from recurra.ops.compat.calls import (
    CHUNK,
    bounds,
    chunks_of,
    dense,
    int32,
    operator,
    refuse_given,
    refuse_gradients,
)
from recurra.ops.precision import wide


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    chunk_size: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule over batched or packed sequences.

    Args:
        q, k: (batch, length, Hk, K). v: (batch, length, Hv, V); Hk divides Hv.
        g: (batch, length, Hv), log decay, or (batch, length, Hv, K), one a key channel (Kimi delta attention).
        beta: (batch, length, Hv).
        scale: factor of the output; None: 1 / sqrt(K).
        initial_state: (S, Hv, K, V) or None for zeros. output_final_state: return the last states.
        use_qk_l2norm_in_kernel: divide each q and k by its length.
        cu_seqlens: (S + 1,) int, bounds of the sequences packed in the only row.
        head_first: has to be False.
        chunk_size: kernel chunk, in tokens; answers don't depend on it but for rounding.

    Returns:
        (batch, length, Hv, V) in v's dtype, and (S, Hv, K, V) float32 or None.

    Raises:
        RefusedArgumentError: ``head_first``; ``cu_seqlens`` with several rows; gradients.
    """
    name = "chunk_gated_delta_rule"
    lengths = _lengths(name, q, cu_seqlens, head_first)
    refuse_gradients(name, q=q, k=k, v=v, g=g, beta=beta, initial_state=initial_state)
    batch, length = q.shape[:2]
    heads, value = v.shape[2:]
    state = torch.zeros(len(lengths) + 1, heads, q.shape[3], value, dtype=wide(q, g), device=q.device)
    if initial_state is not None:
        state[1:] = initial_state
    rows = [t.reshape(batch * length, *t.shape[2:]) for t in (q.to(v.dtype), k.to(v.dtype), v, g, beta)]
    out: Tensor = operator("gated_delta_rule_varlen", q)(
        *(dense(t) for t in rows), state, bounds(lengths, q.device), int32(range(1, len(lengths) + 1), q.device),
        torch.full((len(lengths),), initial_state is not None, device=q.device),
        chunks_of(lengths, chunk_size, q.device), scale=q.shape[3] ** -0.5 if scale is None else scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out.view(v.shape), state[1:] if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same, for few tokens: one token a sequence goes through the update, more through the chunks.

    Args:
        gk: (batch, length, Hv, K), a log decay for each key channel, in the place of ``g``. gv: refused.
        q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens: as in
            :func:`chunk_gated_delta_rule`; beta None is 1.

    Raises:
        RefusedArgumentError: ``gv``; both or neither of ``g`` and ``gk``; as there.
    """
    name = "fused_recurrent_gated_delta_rule"
    refuse_given(name, "decays of value channels are not served.", gv=gv)
    if (g is None) == (gk is None):
        raise RefusedArgumentError(name, "g", "one of g and gk is needed.", "Pass one of them.")
    decay = g if g is not None else gk
    assert decay is not None
    beta = torch.ones(v.shape[:3], dtype=v.dtype, device=v.device) if beta is None else beta
    if cu_seqlens is not None or q.shape[1] != 1:
        return chunk_gated_delta_rule(
            q,
            k,
            v,
            decay,
            beta,
            scale,
            initial_state,
            output_final_state,
            use_qk_l2norm_in_kernel,
            cu_seqlens,
        )
    refuse_gradients(name, q=q, k=k, v=v, g=g, gk=gk, beta=beta, initial_state=initial_state)
    batch = q.shape[0]
    state = torch.zeros(
        batch + 1, v.shape[2], q.shape[3], v.shape[3], dtype=wide(q, decay), device=q.device
    )  # fmt: skip
    if initial_state is not None:
        state[1:] = initial_state
    out: Tensor = operator("gated_delta_rule_update", q)(
        state, *(dense(t[:, 0]) for t in (q.to(v.dtype), k.to(v.dtype), v, decay, beta)),
        int32(range(1, batch + 1), q.device), scale=q.shape[3] ** -0.5 if scale is None else scale,
        qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return out.view(v.shape), state[1:] if output_final_state else None


def _lengths(function: str, q: Tensor, cu_seqlens: Tensor | None, head_first: bool) -> list[int]:
    if head_first:
        raise RefusedArgumentError(
            function, "head_first", "True is not served.", "Pass (batch, length, heads, ...)."
        )
    if cu_seqlens is None:
        return [q.shape[1]] * q.shape[0]
    if q.shape[0] != 1:
        raise RefusedArgumentError(function, "cu_seqlens", f"{q.shape[0]} rows.", "Pack all into one row.")
    lengths: list[int] = cu_seqlens.diff().tolist()
    return lengths


#: Kimi delta attention is the same rule with a decay for each key channel.
chunk_kda = chunk_gated_delta_rule

__all__ = ["chunk_gated_delta_rule", "chunk_kda", "fused_recurrent_gated_delta_rule"]
