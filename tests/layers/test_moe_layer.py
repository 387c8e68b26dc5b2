"""Routing against transformers' routers of every family with experts, and the whole layer against theirs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from recurra.device import detect
from recurra.layers.dtypes import Dtypes
from recurra.layers.mlp import GatedMLP
from recurra.layers.moe import MoE, MoESizes, Routing, route
from recurra.ops import build

T, E, D, K, INNER = 33, 16, 24, 3, 20

_SIGMOID = {
    "num_experts_per_tok": K, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
_GROUPED = Routing(K, "sigmoid", renormalise=True, eps=1e-20, scale=2.5, groups=4, groups_kept=2)
_LFM2 = {
    "num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
}  # fmt: skip

#: Module and class stem in transformers, options, and the routing that equals it.
FAMILIES: dict[str, tuple[str, str, dict[str, Any], Routing]] = {
    "jamba": ("jamba", "Jamba", {"num_experts": E, "num_experts_per_tok": K}, Routing(K, "softmax")),
    "granite": (
        "granitemoehybrid", "GraniteMoeHybrid", {"num_local_experts": E, "num_experts_per_tok": K, "mamba_n_heads": 2},
        Routing(K, "softmax_chosen"),
    ),
    "qwen3_next": (
        "qwen3_next", "Qwen3Next", {"num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": True},
        Routing(K, "softmax", renormalise=True),
    ),
    "qwen3_next as it is": (
        "qwen3_next", "Qwen3Next", {"num_experts": E, "num_experts_per_tok": K, "norm_topk_prob": False},
        Routing(K, "softmax"),
    ),
    "qwen3_5": (
        "qwen3_5_moe", "Qwen3_5Moe", {"num_experts": E, "num_experts_per_tok": K},
        Routing(K, "softmax", renormalise=True),
    ),
    "minimax": (
        "minimax", "MiniMax", {"num_local_experts": E, "num_experts_per_tok": K},
        Routing(K, "softmax", renormalise=True),
    ),
    "nemotron_h": ("nemotron_h", "NemotronH", {"n_routed_experts": E, **_SIGMOID}, _GROUPED),
    "kimi_linear": ("kimi_linear", "KimiLinear", {"num_local_experts": E, **_SIGMOID}, _GROUPED),
    "bailing": ("bailing_hybrid", "BailingHybrid", {"num_local_experts": E, **_SIGMOID}, _GROUPED),
    "bailing as it is": (
        "bailing_hybrid", "BailingHybrid", {"num_local_experts": E, **_SIGMOID, "norm_topk_prob": False},
        replace(_GROUPED, renormalise=False),
    ),
    "lfm2": ("lfm2_moe", "Lfm2Moe", _LFM2, Routing(K, "sigmoid", renormalise=True, eps=1e-6, scale=1.5)),
}  # fmt: skip


def _module(name: str) -> Any:
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def _config(stem: str, options: dict[str, Any]) -> Any:
    import transformers as hf

    kind = getattr(hf, f"{stem}TextConfig", None) or getattr(hf, f"{stem}Config")
    return kind(hidden_size=D, num_attention_heads=2, num_key_value_heads=1, **options)


def _router(name: str, stem: str, config: Any) -> Any:
    module = _module(name)
    found = getattr(module, f"{stem}TopKRouter", None) or getattr(module, f"{stem}TopkRouter")
    router = found(config)
    assert router.weight.shape == (E, D)
    return router


def _by_expert(ids: Tensor, weights: Tensor) -> Tensor:
    return torch.zeros(T, E).scatter(1, ids, weights.float())


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("low", [0.0, -2.0], ids=["bias around 0", "bias below 0"])
def test_as_transformers_routes(family: str, low: float) -> None:
    name, stem, options, routing = FAMILIES[family]
    router = _router(name, stem, _config(stem, options))
    torch.manual_seed(0)
    x, weight, bias = torch.randn(T, D), torch.randn(E, D) * 0.5, torch.rand(E) * 0.6 - 0.3 + low
    biased = hasattr(router, "e_score_correction_bias")
    given: tuple[Tensor, ...] = (x,)
    with torch.no_grad():
        router.weight.copy_(weight)
        if biased:
            router.e_score_correction_bias.copy_(bias)
        if stem == "Lfm2Moe":
            given, biased = (x, bias), True
        _, values, ids = router(*given)
    mine_ids, mine = route(x @ weight.T, routing, bias if biased else None)
    torch.testing.assert_close(_by_expert(mine_ids, mine), _by_expert(ids, values), rtol=1e-5, atol=1e-6)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    ids, weights = route(torch.zeros(1, 4), Routing(1, "sigmoid"), torch.tensor([0.0, 0.0, 9.0, 0.0]))
    assert ids.tolist() == [[2]]
    assert weights.tolist() == [[0.5]]


def test_groups_of_one_expert() -> None:
    routing = Routing(2, "sigmoid", groups=4, groups_kept=2)
    ids, _ = route(torch.tensor([[1.0, -1.0, 3.0, 0.0]]), routing)
    assert sorted(ids[0].tolist()) == [0, 2]


def _layer(sizes: MoESizes, shared: int) -> MoE:
    ops, device = build(detect("cpu"), backend="reference"), torch.device("cpu")
    dtypes = Dtypes(torch.float32, torch.float32, torch.float32)
    tools: dict[str, Any] = {"ops": ops, "dtypes": dtypes, "device": device}
    one = GatedMLP(D, shared, activation="silu", bias=False, **tools) if shared else None
    return MoE(sizes, shared=one, **tools)


def test_experts_and_a_gated_shared_one_as_qwen_has_them() -> None:
    options = {
        "num_experts": E, "num_experts_per_tok": K, "moe_intermediate_size": INNER, "norm_topk_prob": True,
        "shared_expert_intermediate_size": 12,
    }  # fmt: skip
    block = _module("qwen3_next").Qwen3NextSparseMoeBlock(_config("Qwen3Next", options))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    routing = Routing(K, "softmax", renormalise=True)
    layer = _layer(MoESizes(D, INNER, E, routing, shared_gated=True), 12)
    stored = dict(block.named_parameters())
    gate, up = stored["shared_expert.gate_proj.weight"], stored["shared_expert.up_proj.weight"]
    layer.load_state_dict({
        "router": stored["gate.weight"],
        "w_in": stored["experts.gate_up_proj"],
        "w_out": stored["experts.down_proj"],
        "shared_gate.weight": stored["shared_expert_gate.weight"],
        "shared.w_in.weight": torch.cat((gate, up)),
        "shared.w_out.weight": stored["shared_expert.down_proj.weight"],
    })  # fmt: skip
    x = torch.randn(T, D)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), block(x[None])[0], rtol=1e-4, atol=1e-5)


def test_experts_without_a_gate_beside_a_shared_one_that_is_not_weighed() -> None:
    """What the layer adds for all tokens doesn't depend on the routing."""
    torch.manual_seed(2)
    sizes = MoESizes(D, INNER, E, Routing(K, "sigmoid"), activation="relu2", gated=False, has_bias=True)
    layer = _layer(sizes, 8)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
        x = torch.randn(T, D)
        whole = layer(x)
        assert layer.shared is not None
        rest = whole - layer.shared(x)
        layer.shared = None
        torch.testing.assert_close(layer(x), rest, rtol=1e-4, atol=1e-5)
        assert rest.norm() > 1
