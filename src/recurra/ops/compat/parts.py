"""The named parts of Mamba-2's chunked scan, each a few matrix products in plain PyTorch on any device.

With dt the step sizes and c[t] the sum of ``dt * A`` from a chunk's first token to t (included):

    bmm           CB[i, j]  = C[i] . B[j]
    chunk state   S_k       = sum over j of exp(c[last] - c[j]) dt[j] x[j] (outer) B[j]
    state passing S         = exp(c[last]) S + S_k, chunk after chunk
    chunk scan    y[i]      = exp(c[i]) C[i] . S + sum over j <= i of CB[i, j] exp(c[i] - c[j]) dt[j] x[j] + D x[i]

Source: Mamba-2 (Dao and Gu, 2024), section 6. The engine's scan (:mod:`recurra.ops.ssm`) fuses them and calls none of
these; they are here for code that was written for the parts. All compute in float32, or float64 if given it.
Chunks are (batch, chunks, ...): a length that is no multiple of the chunk is padded with steps of zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.errors import RefusedArgumentError
from recurra.ops.compat.calls import refuse_given, refuse_gradients
from recurra.ops.precision import wide

_NO_LIMIT = (0.0, float("inf"))


def step_sizes(
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    dtype: torch.dtype,
) -> Tensor:
    """``softplus(dt + dt_bias)`` within its bounds; heads are the last dimension."""
    step = dt.to(dtype)
    if dt_bias is not None:
        step = step + dt_bias.to(dtype)
    if dt_softplus:
        step = F.softplus(step)
    return step if tuple(dt_limit) == _NO_LIMIT else step.clamp(*dt_limit)


def _chunked(value: Tensor, size: int) -> Tensor:
    """(batch, length, ...) as (batch, chunks, size, ...), zeros behind the end."""
    short = -value.shape[1] % size
    if short:
        value = torch.cat([value, value.new_zeros(value.shape[0], short, *value.shape[2:])], dim=1)
    return value.reshape(value.shape[0], -1, size, *value.shape[2:])


def chunk_cumsum(
    dt: Tensor,
    A: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = _NO_LIMIT,
) -> tuple[Tensor, Tensor]:
    """Sums of ``dt * A`` within chunks, and the step sizes: (batch, H, chunks, Q) each, from dt (batch, length, H)."""
    refuse_gradients("chunk_cumsum", dt=dt, A=A, dt_bias=dt_bias)
    dtype = wide(dt, A)
    steps = _chunked(step_sizes(dt, dt_bias, dt_softplus, dt_limit, dtype), chunk_size).permute(0, 3, 1, 2)
    return (steps * A.to(dtype)[:, None, None]).cumsum(-1), steps


def ssd_bmm(
    a: Tensor,
    b: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    causal: bool = False,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """``a[i] . b[j]`` within chunks.

    Args:
        a, b: (batch, length, G, N), or (batch, length, N).
        seq_idx: (batch, length) int: products of tokens of different sequences are zeros.
        causal: what lies above the diagonal may be anything; here it is computed all the same.
        output_dtype: None: a's dtype.

    Returns:
        (batch, chunks, G, Q, Q), or (batch, chunks, Q, Q).
    """
    del causal
    refuse_gradients("ssd_bmm", a=a, b=b)
    dtype = wide(a, b)
    grouped = a.dim() == 4
    left, right = (_chunked((t if grouped else t[:, :, None]).to(dtype), chunk_size) for t in (a, b))
    out = torch.einsum("bkign,bkjgn->bkgij", left, right)
    if seq_idx is not None:
        out = out * _same(seq_idx, chunk_size)[:, :, None]
    return (out if grouped else out[:, :, 0]).to(a.dtype if output_dtype is None else output_dtype)


def _same(seq_idx: Tensor, size: int) -> Tensor:
    numbers = _chunked(seq_idx, size)
    return numbers[..., :, None] == numbers[..., None, :]


def ssd_chunk_state(
    B: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    seq_idx: Tensor | None = None,
    states_in_fp32: bool = True,
) -> Tensor:
    """Each chunk's own contribution to the state after it.

    Args:
        B: (batch, length, G, N). x: (batch, length, H, P). dt, dA_cumsum: from :func:`chunk_cumsum`.
        seq_idx: (batch, length) int: only tokens of the sequence that ends the chunk count.
        states_in_fp32: return float32, not x's dtype.

    Returns:
        (batch, chunks, H, P, N).
    """
    refuse_gradients("ssd_chunk_state", B=B, x=x, dt=dt, dA_cumsum=dA_cumsum)
    dtype = wide(B, x, dt, dA_cumsum)
    size, per_group = dt.shape[3], x.shape[2] // B.shape[2]
    weight = torch.exp(dA_cumsum[..., -1:] - dA_cumsum).to(dtype) * dt
    if seq_idx is not None:
        numbers = _chunked(seq_idx, size)
        ends = torch.tensor(
            [min((k + 1) * size, seq_idx.shape[1]) - 1 for k in range(numbers.shape[1])], device=x.device
        )
        weight = weight * (numbers == seq_idx[:, ends][..., None])[:, None]
    keys = _chunked(B.to(dtype), size).repeat_interleave(per_group, dim=3)
    out = torch.einsum("bhkj,bkjhp,bkjhn->bkhpn", weight, _chunked(x.to(dtype), size), keys)
    return out if states_in_fp32 else out.to(x.dtype)


def ssd_state_passing(
    states: Tensor,
    dA_chunk_cumsum: Tensor,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    chunk_size: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, and after the last.

    Args:
        states: (batch, chunks, H, dim), from :func:`ssd_chunk_state`, P and N as one dimension.
        dA_chunk_cumsum: (batch, H, chunks), each chunk's whole sum.
        initial_states: (batch, H, dim) or None for zeros.
        seq_idx, chunk_size: a chunk that ends in another sequence than the one before forgets it.

    Returns:
        (batch, chunks, H, dim) in ``out_dtype`` or the states', and (batch, H, dim) float32.

    Raises:
        RefusedArgumentError: ``seq_idx`` without ``chunk_size``; gradients.
    """
    name = "ssd_state_passing"
    refuse_gradients(name, states=states, dA_chunk_cumsum=dA_chunk_cumsum, initial_states=initial_states)
    if seq_idx is not None and chunk_size is None:
        raise RefusedArgumentError(name, "seq_idx", "chunk_size says where chunks end.", "Pass it.")
    dtype = wide(states, dA_chunk_cumsum)
    count = states.shape[1]
    carried = (
        torch.zeros_like(states[:, 0], dtype=dtype) if initial_states is None else initial_states.to(dtype)
    )
    before = torch.zeros(states.shape, dtype=dtype, device=states.device)
    sequence = None if seq_idx is None else seq_idx[:, 0] * 0
    for k in range(count):
        before[:, k] = carried
        decay = torch.exp(dA_chunk_cumsum[:, :, k].to(dtype))
        if seq_idx is not None and sequence is not None and chunk_size is not None:
            now = seq_idx[:, min((k + 1) * chunk_size, seq_idx.shape[1]) - 1]
            decay = decay * (now == sequence)[:, None]
            sequence = now
        carried = decay[..., None] * carried + states[:, k].to(dtype)
    return before.to(states.dtype if out_dtype is None else out_dtype), carried


def ssd_chunk_scan(
    cb: Tensor,
    x: Tensor,
    dt: Tensor,
    dA_cumsum: Tensor,
    C: Tensor,
    states: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The outputs, from all the parts.

    Args:
        cb: (batch, chunks, G, Q, Q), from :func:`ssd_bmm` of C and B. x: (batch, length, H, P).
        dt, dA_cumsum: (batch, H, chunks, Q). C: (batch, length, G, N).
        states: (batch, chunks, H, P, N), before each chunk.
        D: (H,) or (H, P) or None. z: like x or None; the result is multiplied by silu(z).
        seq_idx: refused: cut the sequences apart, as ``mamba_chunk_scan_combined`` does.

    Returns:
        (batch, length, H, P) in x's dtype.

    Raises:
        RefusedArgumentError: ``seq_idx``; gradients.
    """
    name = "ssd_chunk_scan"
    refuse_given(name, "sequences are cut apart in mamba_chunk_scan_combined.", seq_idx=seq_idx)
    refuse_gradients(name, cb=cb, x=x, dt=dt, dA_cumsum=dA_cumsum, C=C, states=states, D=D, z=z)
    dtype = wide(x, dt, dA_cumsum, states)
    length, size, heads = x.shape[1], dt.shape[3], x.shape[2]
    per_group = heads // C.shape[2]
    sums = dA_cumsum.to(dtype)
    past = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    between = (
        (sums[..., :, None] - sums[..., None, :]).masked_fill(~past, float("-inf")).exp()
    )  # (b, h, k, i, j)
    xs = _chunked(x.to(dtype), size)
    weights = (
        cb.to(dtype).repeat_interleave(per_group, dim=2).transpose(1, 2)
        * between
        * dt.to(dtype)[..., None, :]
    )
    queries = _chunked(C.to(dtype), size).repeat_interleave(per_group, dim=3)
    y = torch.einsum("bhkij,bkjhp->bkihp", weights.masked_fill(~past, 0.0), xs)
    y = y + torch.einsum("bkihn,bkhpn,bhki->bkihp", queries, states.to(dtype), sums.exp())
    if D is not None:
        y = y + (D.to(dtype)[:, None] if D.dim() == 1 else D.to(dtype)) * xs
    y = y.flatten(1, 2)[:, :length]
    return (y if z is None else y * F.silu(z.to(dtype))).to(x.dtype)


def chunk_states_after(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    dt_bias: Tensor | None,
    initial: Tensor,
    bounds: list[int],
    sequences: list[int],
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> Tensor:
    """The state after every chunk of packed sequences: (chunks, H, P, N).

    Args:
        initial: (S, H, P, N), the states before the sequences' first tokens.
        bounds: of the chunks in the packed tokens, one more than there are chunks.
        sequences: each chunk's sequence; chunks of a sequence follow each other.
    """
    dtype = wide(x, A)
    steps = step_sizes(dt, dt_bias, dt_softplus, dt_limit, dtype)
    per_group = x.shape[1] // B.shape[1]
    after = torch.empty(len(sequences), *initial.shape[1:], dtype=dtype, device=x.device)
    for k, sequence in enumerate(sequences):
        mine = slice(bounds[k], bounds[k + 1])
        carried = after[k - 1] if k and sequences[k - 1] == sequence else initial[sequence].to(dtype)
        sums = (steps[mine] * A.to(dtype)).cumsum(0)
        whole = sums[-1:] if sums.shape[0] else sums.new_zeros(1, sums.shape[1])
        weight = torch.exp(whole - sums) * steps[mine]
        keys = B[mine].to(dtype).repeat_interleave(per_group, dim=1)
        own = torch.einsum("jh,jhp,jhn->hpn", weight, x[mine].to(dtype), keys)
        after[k] = torch.exp(whole[0])[:, None, None] * carried + own
    return after
