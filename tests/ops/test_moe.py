"""Experts against a loop over tokens in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends import Backend
from torch import Tensor

from recurra.ops.moe.activation import BY_NAME


def _inputs(
    tokens: int,
    experts: int,
    choices: int,
    D: int,
    inner: int,
    gated: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor, ...]:
    torch.manual_seed(tokens + experts)
    x = torch.randn(tokens, D + 3)[:, :D]
    w_in = torch.randn(experts, inner * (1 + gated), D) / D**0.5
    w_out = torch.randn(experts, D, inner) / inner**0.5
    ids = (
        torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)])
        if tokens
        else torch.zeros(0, choices)
    )
    weights = torch.rand(tokens, choices)
    placed = (t.to(device, dtype) for t in (x, w_in, w_out))
    return (*placed, ids.long().to(device), weights.to(device))


def _by_token(
    x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, weights: Tensor, activation: str, gated: bool
) -> Tensor:
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros(x.shape[1], dtype=x.dtype)
        for expert, weight in zip(ids[t].tolist(), weights[t], strict=True):
            h = w_in[expert] @ x[t]
            half = h.shape[0] // 2
            h = BY_NAME[activation](h[:half]) * h[half:] if gated else BY_NAME[activation](h)
            row += weight * (w_out[expert] @ h)
        rows.append(row)
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize(
    ("tokens", "experts", "choices", "D", "inner", "activation", "gated"),
    [
        (1, 4, 2, 24, 40, "silu", True),
        (7, 5, 1, 33, 17, "relu2", False),
        (70, 6, 3, 40, 24, "gelu", True),
        (37, 2, 2, 16, 16, "silu", False),
        (3, 16, 4, 16, 80, "gelu_pytorch_tanh", True),
        (2, 16, 4, 530, 40, "gelu", True),
        (1, 3, 2, 30, 10, "relu", True),
        (4, 64, 3, 24, 16, "silu", True),
        (2, 20, 3, 33, 17, "relu2", False),
    ],
)
def test_as_exact_as_plain_pytorch(
    backend: Backend,
    tokens: int,
    experts: int,
    choices: int,
    D: int,
    inner: int,
    activation: str,
    gated: bool,
) -> None:
    op = backend.op("expert_mlp")
    for dtype in backend.dtypes:
        if backend.interpreted and dtype == torch.bfloat16:
            continue  # the interpreter multiplies bit patterns of bfloat16
        given = _inputs(tokens, experts, choices, D, inner, gated, dtype, backend.device)
        wide = tuple(t.double() if t.is_floating_point() else t for t in (t.cpu() for t in given))
        truth = _by_token(*wide, activation, gated)
        plain = _by_token(
            *(t.cpu() if i != 4 else t.cpu().to(dtype) for i, t in enumerate(given)), activation, gated
        )
        got = op(*given, activation=activation, gated=gated)
        assert got.dtype == dtype
        bound = (plain.double() - truth).norm() + 1e-7 * truth.norm()
        assert (got.cpu().double() - truth).norm() <= 2 * bound


def test_a_token_is_the_same_in_any_company(backend: Backend) -> None:
    op = backend.op("expert_mlp")
    x, w_in, w_out, ids, weights = _inputs(20, 5, 2, 32, 24, True, torch.float32, backend.device)
    together = op(x, w_in, w_out, ids, weights, activation="silu", gated=True)
    for t in (0, 7, 19):
        alone = op(
            x[t : t + 1], w_in, w_out, ids[t : t + 1], weights[t : t + 1], activation="silu", gated=True
        )
        torch.testing.assert_close(alone[0], together[t], rtol=1e-5, atol=1e-5)


def test_no_tokens_and_unused_experts_that_are_not_finite(backend: Backend) -> None:
    op = backend.op("expert_mlp")
    x, w_in, w_out, ids, weights = _inputs(9, 8, 2, 16, 8, True, torch.float32, backend.device)
    unused = sorted(set(range(8)) - set(ids[:2].flatten().tolist()))
    w_in[unused], w_out[unused] = float("nan"), float("nan")
    assert op(x[:2], w_in, w_out, ids[:2], weights[:2], activation="silu", gated=True).isfinite().all()
    assert op(x[:0], w_in, w_out, ids[:0], weights[:0], activation="silu", gated=True).shape == (0, 16)


def test_float64_is_exact_in_the_reference() -> None:
    from recurra.ops.moe.reference import expert_mlp

    given = _inputs(6, 3, 2, 12, 10, True, torch.float64, torch.device("cpu"))
    want = _by_token(*given, "silu", True)
    assert torch.allclose(expert_mlp(*given, activation="silu", gated=True), want, rtol=1e-12, atol=1e-12)
    assert F.silu is BY_NAME["silu"]


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 40])
def test_a_graph_follows_other_choices(tokens: int) -> None:
    """Nothing that the host knows of the choices is recorded: replayed with others the answer is the others'."""
    device = torch.device("cuda")
    op = Backend("triton", device).op("expert_mlp")
    x, w_in, w_out, ids, weights = _inputs(tokens, 8, 2, 64, 48, True, torch.bfloat16, device)

    def call() -> Tensor:
        return op(x, w_in, w_out, ids, weights, activation="silu", gated=True)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    ids.copy_(7 - ids)
    graph.replay()
    assert torch.equal(out, call())
