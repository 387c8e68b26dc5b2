"""One call points a transformers model at our operators: the same logits, prompt and steps, and back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from recurra.errors import RefusedArgumentError
from recurra.ops.compat.transformers import use_recurra

_COMMON = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2}
_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
_HEADS = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_chunk_size": 16,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {**_COMMON, "state_size": 6}),
    "falcon_mamba": ("FalconMamba", {**_COMMON, "state_size": 6}),
    "mamba2": (
        "Mamba2",
        {**_COMMON, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 12, "chunk_size": 16},
    ),
    "bamba": ("Bamba", {**_COMMON, **_ATTENTION, **_HEADS, "attn_layer_indices": [1]}),
    "jamba": (
        "Jamba",
        {
            **_COMMON, **_ATTENTION, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2,
            "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 6,
            "mamba_dt_rank": 4, "use_mamba_kernels": False,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_COMMON, **_ATTENTION, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 6, "num_experts": 2, "num_experts_per_tok": 1,
            "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": ("Lfm2", {**_COMMON, **_ATTENTION, "layer_types": ["conv", "full_attention"]}),
}  # fmt: skip


def _model(family: str) -> Any:
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    name, options = MODELS[family]
    config = getattr(transformers, f"{name}Config")(**options)
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(std=0.3)
    return model


@torch.no_grad()
def _logits(model: Any) -> torch.Tensor:
    """Two prompts of 21 tokens at once, then three tokens one by one."""
    tokens = torch.randint(0, 40, (2, 24), generator=torch.Generator().manual_seed(2))
    out = model(tokens[:, :21], use_cache=True)
    key = next(k for k in ("cache", "past_key_values", "cache_params") if out.get(k) is not None)
    cache = {key: out[key]}
    found = [out.logits]
    for t in range(21, 24):
        out = model(tokens[:, t : t + 1], use_cache=True, **cache)
        found.append(out.logits)
    return torch.cat(found, 1)


@pytest.mark.parametrize("family", list(MODELS))
def test_logits_are_the_same_and_the_call_is_undone(family: str) -> None:
    model = _model(family)
    before = _logits(model)
    undo = use_recurra(model)
    after = _logits(model)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4 * before.abs().max().item())
    with pytest.raises(RefusedArgumentError, match="gradient"):  # so these are ours
        model(torch.zeros(1, 4, dtype=torch.int64))
    undo()
    assert torch.equal(_logits(model), before)


def test_another_model_is_left_alone() -> None:
    one, other = _model("mamba"), _model("mamba")
    before = _logits(other)
    use_recurra(one)
    assert torch.equal(_logits(other), before)


def test_a_model_without_recurrent_operators_is_refused() -> None:
    with pytest.raises(RefusedArgumentError, match="use_recurra: model: nothing in this Linear"):
        use_recurra(nn.Linear(2, 2))
