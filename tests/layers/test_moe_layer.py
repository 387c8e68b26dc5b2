"""Routing against transformers' routers, and the layer's parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recurra.layers.moe import Routing, route

T, E, D = 33, 16, 24


def _hf(name: str) -> tuple[Any, Routing, bool]:
    """A router of transformers, the routing that equals it, and whether it has a bias."""
    import transformers as hf

    if name == "qwen3_next":
        from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextTopKRouter as Router

        config = hf.Qwen3NextConfig(num_experts=E, num_experts_per_tok=3, hidden_size=D, norm_topk_prob=True)
        return Router(config), Routing(3, "softmax", renormalise=True), False
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter as Sigmoid

    config = hf.NemotronHConfig(
        n_routed_experts=E, num_experts_per_tok=3, hidden_size=D, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )  # fmt: skip
    routing = Routing(3, "sigmoid", renormalise=True, eps=1e-20, scale=2.5, groups=4, groups_kept=2)
    return Sigmoid(config), routing, True


@pytest.mark.parametrize("name", ["qwen3_next", "nemotron_h"])
def test_as_transformers_routes(name: str) -> None:
    torch.manual_seed(0)
    router, routing, biased = _hf(name)
    x, weight, bias = torch.randn(T, D), torch.randn(E, D), torch.rand(E) * 0.3
    with torch.no_grad():
        router.weight.copy_(weight)
        if biased:
            router.e_score_correction_bias.copy_(bias)
        _, values, ids = router(x)
    mine_ids, mine = route(x @ weight.T, routing, bias if biased else None)
    want = torch.zeros(T, E).scatter(1, ids, values.float())
    assert torch.allclose(torch.zeros(T, E).scatter(1, mine_ids, mine), want, atol=1e-6)


def test_softmax_over_the_chosen_alone() -> None:
    logits = torch.tensor([[1.0, 5.0, 3.0, -2.0]])
    ids, weights = route(logits, Routing(2, "softmax_chosen"))
    assert ids.tolist() == [[1, 2]]
    assert torch.allclose(weights, torch.tensor([[5.0, 3.0]]).softmax(-1))


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.zeros(1, 4)
    ids, weights = route(logits, Routing(1, "sigmoid"), torch.tensor([0.0, 0.0, 9.0, 0.0]))
    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[0.5]]
