"""Delta mixers and latent attention against their equations in float64: whole, cut anywhere, and token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recurra.cache.pages import PagePool
from recurra.cache.pool import StatePool
from recurra.cache.spec import KVSpec
from recurra.device import detect
from recurra.layers.delta import DeltaMixer, DeltaSizes, GatedDeltaNet, KimiDeltaAttention
from recurra.layers.dtypes import Dtypes
from recurra.layers.latent import LatentAttention, LatentSizes
from recurra.layers.rotary import RotarySizes, plain
from recurra.ops import build
from recurra.types import Chunks, ForwardBatch

CPU, HIDDEN, T, SLOT, PAGE = torch.device("cpu"), 20, 70, 2, 8
WIDE = Dtypes(torch.float64, torch.float64, torch.float64, torch.float64)
TOOLS: dict[str, Any] = {"ops": build(detect("cpu"), "reference"), "dtypes": WIDE, "device": CPU}

NET = DeltaSizes(HIDDEN, 2, 6, 7, 5, 4, 1e-5, beta_scale=2.0)
KIMI = {
    "bottlenecks": DeltaSizes(HIDDEN, 3, 3, 6, 6, 3, 1e-5, rank=4),
    "direct": DeltaSizes(HIDDEN, 3, 3, 6, 5, 4, 1e-5),
    "bounded": DeltaSizes(HIDDEN, 3, 3, 6, 6, 4, 1e-5, decay_bound=-5.0),
}
LATENT = {
    "plain": LatentSizes(HIDDEN, 3, 6, 4, 5, 9, 0.4, 1e-6),
    "all": LatentSizes(
        HIDDEN, 3, 6, 4, 5, 9, 0.4, 1e-6, query_rank=8, bias=True, gated=True,
        rotary=RotarySizes(4, tuple(plain(4, 100.0).tolist()), interleaved=True),
    ),
}  # fmt: skip


def _fill(mixer: torch.nn.Module) -> None:
    torch.manual_seed(0)
    for name, parameter in mixer.named_parameters():
        parameter.data.normal_(0.0, 1.0 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
        if name == "A":
            parameter.data.uniform_(-0.3, -0.05)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)


def _batch(tokens: int, start: int, decode: bool) -> ForwardBatch:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    pages = range(1, 1 + -(-(start + tokens) // PAGE))
    return ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(start, start + tokens),
        slots=ints(SLOT),
        num_decode=int(decode),
        cu_seqlens=ints(0) if decode else ints(0, tokens),
        has_state=torch.tensor([] if decode else [start > 0], dtype=torch.bool),
        max_seqlen=0 if decode else tokens,
        chunks=Chunks(64, ints(), ints(), ints(), ints(0)),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        page_table=ints(*pages)[None],
        context_lens=ints(start + tokens),
        kv_rows=torch.arange(start, start + tokens) + PAGE,
        max_context=start + tokens,
    )


def _run(mixer: Any, x: Tensor, cuts: list[int], decode: bool = False) -> Tensor:
    """In pieces, cut at these positions; the first as a prompt, the others too, or as steps of one token."""
    spec = mixer.state_spec()
    if isinstance(spec, KVSpec):
        state: Any = PagePool((spec,), 12, PAGE, CPU).layers[0]
    else:
        state = StatePool((spec,), 3, CPU).layers[0]
    pieces = []
    for a, b in pairwise([0, *cuts, len(x)]):
        method = mixer.decode if decode and a > 0 else mixer.prefill
        pieces.append(method(x[a:b], _batch(b - a, a, decode and a > 0), state))
    return torch.cat(pieces)


def _assert_right(mixer: Any, want: Tensor, x: Tensor, tolerance: float = 1e-10) -> None:
    for got in (_run(mixer, x, []), _run(mixer, x, [1, 2, 34, 65]), _run(mixer, x, list(range(1, T)), True)):
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def _recurrence(mixer: DeltaMixer, mixed: Tensor, g: Tensor, b: Tensor) -> Tensor:
    """Token by token, (T, Hv, V); g is (T, Hv, K)."""
    s = mixer.sizes
    padded = F.pad(mixed.T, (s.conv_kernel - 1, 0))
    mixed = F.silu(F.conv1d(padded[None], mixer.conv1d.weight[:, None], groups=mixed.shape[1]))[0].T
    q, k, v = torch.split(mixed, [s.keys, s.keys, s.values], dim=1)
    shared = s.value_heads // s.key_heads
    q, k = (t.reshape(T, s.key_heads, s.key_dim).repeat_interleave(shared, 1) for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    v, beta = v.reshape(T, s.value_heads, s.value_dim), s.beta_scale * torch.sigmoid(b)
    state = torch.zeros(s.value_heads, s.key_dim, s.value_dim, dtype=torch.float64)
    rows = []
    for t in range(T):
        state = state * g[t].exp()[..., None]
        u = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], state))
        state = state + torch.einsum("hk,hv->hkv", k[t], u)
        rows.append(torch.einsum("hk,hkv->hv", q[t], state) * s.key_dim**-0.5)
    return torch.stack(rows)


def _finish(mixer: Any, y: Tensor, gate: Tensor) -> Tensor:
    s = mixer.sizes
    normed = y / (y.square().mean(-1, keepdim=True) + s.norm_eps).sqrt()
    out: Tensor = (normed.flatten(1) * mixer.norm.weight * gate) @ mixer.out_proj.weight.T
    return out


def test_gated_delta_net() -> None:
    mixer = GatedDeltaNet(NET, **TOOLS)
    _fill(mixer)
    x = torch.randn(T, HIDDEN, dtype=torch.float64)
    parts = [NET.conv_channels, NET.values, NET.value_heads, NET.value_heads]
    mixed, z, b, a = torch.split(x @ mixer.in_proj.weight.T, parts, dim=1)
    g = (mixer.A * F.softplus(a + mixer.dt_bias))[..., None].expand(-1, -1, NET.key_dim)
    _assert_right(mixer, _finish(mixer, _recurrence(mixer, mixed, g, b), F.silu(z)), x)


@pytest.mark.parametrize("name", KIMI)
def test_kimi_delta_attention(name: str) -> None:
    s = KIMI[name]
    mixer = KimiDeltaAttention(s, **TOOLS)
    _fill(mixer)
    x = torch.randn(T, HIDDEN, dtype=torch.float64)
    parts = [s.conv_channels, s.rank or s.keys, s.rank or s.values, s.value_heads]
    mixed, a, z, b = torch.split(x @ mixer.in_proj.weight.T, parts, dim=1)
    if mixer.decay_proj is not None and mixer.gate_proj is not None:
        a, z = a @ mixer.decay_proj.weight.T, z @ mixer.gate_proj.weight.T
    steps, rate = (a + mixer.dt_bias).view(T, 3, s.key_dim), -mixer.A[:, None]
    g = -rate * F.softplus(steps) if s.decay_bound is None else s.decay_bound * torch.sigmoid(rate * steps)
    _assert_right(mixer, _finish(mixer, _recurrence(mixer, mixed, g, b), torch.sigmoid(z)), x)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _turned(x: Tensor, sizes: RotarySizes | None) -> Tensor:
    """Pairs of neighbours as complex numbers: x is (T, heads, dim)."""
    if sizes is None:
        return x
    angles = torch.arange(T)[:, None] * torch.tensor(sizes.frequencies)
    turns = torch.polar(torch.ones(angles.shape, dtype=torch.float64), angles.double())[:, None]
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(
        -2
    )


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention(name: str) -> None:
    s = LATENT[name]
    mixer: Any = LatentAttention(s, **TOOLS)
    _fill(mixer)
    x = torch.randn(T, HIDDEN, dtype=torch.float64)
    bias = (mixer.kv_down.bias, mixer.o_proj.bias) if s.bias else (0.0, 0.0)
    queries = x
    if s.query_rank:
        queries = _norm(x @ mixer.q_down.weight.T + mixer.q_down.bias, mixer.q_norm.weight)
    q = (queries @ mixer.q_proj.weight.T).view(T, 3, 10)
    c, shared = torch.split(x @ mixer.kv_down.weight.T + bias[0], [9, 4], dim=1)
    kv = (_norm(c, mixer.kv_norm.weight) @ mixer.kv_up.weight.T).view(T, 3, 11)
    q = torch.cat((q[..., :6], _turned(q[..., 6:], s.rotary)), dim=-1)
    k = torch.cat((kv[..., :6], _turned(shared[:, None], s.rotary).expand(-1, 3, -1)), dim=-1)
    scores = torch.einsum("thd,shd->hts", q, k) * s.scale
    mask = torch.ones(T, T, dtype=torch.bool).triu(1)
    y = torch.einsum("hts,shd->thd", scores.masked_fill(mask, -torch.inf).softmax(-1), kv[..., 6:])
    if s.gated:
        y = y * torch.sigmoid(x @ mixer.gate.weight.T)[..., None]
    want = y.flatten(1) @ mixer.o_proj.weight.T + bias[1]
    _assert_right(mixer, want, x, 1e-10 if s.rotary is None else 1e-6)  # angles are float32
