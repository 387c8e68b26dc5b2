"""Configurations of families with delta rules: the published ones give the published sizes, others are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import machine_of

from recurra.errors import CheckpointError
from recurra.models import ModelConfig, read_config, skeleton

_OUTER = {"dtype": "bfloat16", "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48}
QWEN3_NEXT: dict[str, Any] = _OUTER | {
    "model_type": "qwen3_next", "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
    "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_key_value_heads": 2, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-6, "rope_theta": 10000000, "rope_scaling": None,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip
KIMI_LINEAR: dict[str, Any] = _OUTER | {
    "model_type": "kimi_linear", "vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27,
    "first_k_dense_replace": 1, "head_dim": 72, "intermediate_size": 9216, "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
        "kda_layers": [i for i in range(1, 27) if i % 4], "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024, "moe_layer_freq": 1,
    "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_key_value_heads": 32,
    "num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.446, "topk_group": 1, "v_head_dim": 128,
}  # fmt: skip
OLMO_HYBRID: dict[str, Any] = _OUTER | {
    "model_type": "olmo_hybrid", "vocab_size": 100352, "hidden_size": 3840, "num_hidden_layers": 32,
    "intermediate_size": 11008, "num_attention_heads": 30, "num_key_value_heads": None, "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "linear_key_head_dim": None,
}  # fmt: skip
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_moe", "vision_config": {"hidden_size": 1152}, "tie_word_embeddings": False,
    "text_config": _OUTER | {
        "vocab_size": 248320, "num_hidden_layers": 40, "rms_norm_eps": 1e-6, "full_attention_interval": 4,
        "moe_intermediate_size": 512, "num_experts": 256, "num_experts_per_tok": 8,
        "shared_expert_intermediate_size": 512, "rope_parameters": {"rope_theta": 1e7, "rope_type": "default"},
    },
}  # fmt: skip


def _read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(folder)


@pytest.mark.parametrize(
    ("config", "billions", "attending"),
    [(QWEN3_NEXT, 79.7, 12), (KIMI_LINEAR, 49.1, 7), (OLMO_HYBRID, 7.4, 8), (QWEN3_5, 34.7, 10)],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_published_sizes(config: dict[str, Any], billions: float, attending: int, tmp_path: Path) -> None:
    found = _read(tmp_path, config)
    dtype = torch.bfloat16
    model = skeleton(
        found, ops=machine_of("cpu", "reference").ops, weight_dtype=dtype, act_dtype=dtype, conv_dtype=dtype,
        ssm_dtype=torch.float32,
    )  # fmt: skip
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 1) == billions
    assert sum(found.sizes.attends) == attending


def test_settings_of_other_names(tmp_path: Path) -> None:
    found = _read(tmp_path, KIMI_LINEAR)
    assert found.max_length == 1048576
    routing = found.sizes.experts.routing
    assert (routing.top_k, routing.scale, routing.renormalise) == (8, 2.446, True)
    assert [i for i, sparse in enumerate(found.sizes.sparse) if not sparse] == [0]


@pytest.mark.parametrize(
    ("config", "changes", "named"),
    [
        (QWEN3_NEXT, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3_NEXT, {"linear_num_value_heads": 24}, "linear_num_value_heads"),
        (QWEN3_NEXT, {"attn_output_gate": False}, "attn_output_gate"),
        (QWEN3_NEXT, {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN3_NEXT, {"layer_types": ["mamba"] * 48}, "mamba"),
        (OLMO_HYBRID, {"linear_num_value_heads": 7}, "linear_num_value_heads"),
        (KIMI_LINEAR, {"mla_use_nope": False}, "mla_use_nope"),
        (KIMI_LINEAR, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        (KIMI_LINEAR, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (
            KIMI_LINEAR,
            {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1]}},
            "linear_attn_config",
        ),
    ],
)
def test_refused_by_name(config: dict[str, Any], changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=named):
        _read(tmp_path, config | changes)
