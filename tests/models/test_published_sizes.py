"""Configurations as published: every key is understood, and the model has as many parameters as its card (for Zamba2,
transformers) says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import machine_of

from recurra.models import read_config, skeleton

#: Name: (billions of parameters, configuration). Keys about training, dropout and speed are kept as they come.
PUBLISHED: dict[str, tuple[float, dict[str, Any]]] = {
    "Bamba-9B": (9.78, {
        "architectures": ["BambaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_layer_indices": [9, 18, 27], "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
        "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 262144,
        "mlp_bias": False, "model_type": "bamba", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "torch_dtype": "float32", "use_cache": True, "vocab_size": 128256,
    }),
    "Jamba-v0.1": (51.57, {
        "architectures": ["JambaForCausalLM"], "attention_dropout": 0.0, "attn_layer_offset": 4,
        "attn_layer_period": 8, "bos_token_id": 1, "calc_logits_for_entire_prompt": False, "eos_token_id": 2,
        "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_inner_layernorms": True,
        "mamba_proj_bias": False, "model_type": "jamba", "n_ctx": 262144, "num_attention_heads": 32,
        "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "output_router_logits": False, "pad_token_id": 0, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
        "use_mamba_kernels": True, "vocab_size": 65536,
    }),
    "Falcon-H1-0.5B": (0.521, {
        "architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375, "attn_layer_indices": None,
        "bos_token_id": 1, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048,
        "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": False,
        "mamba_proj_bias": False, "mamba_rms_norm": False, "mamba_use_mlp": True, "max_position_embeddings": 16384,
        "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
        "model_type": "falcon_h1", "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2,
        "num_logits_to_keep": 1, "pad_token_id": 0, "projectors_bias": False, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
        "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto", "torch_dtype": "bfloat16",
        "use_cache": True, "vocab_size": 32784,
    }),
    "granite-4.0-h-tiny": (6.94, {
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12,
        "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 1536, "init_method": "mup",
        "intermediate_size": 512,
        "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
        "logits_scaling": 6, "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48,
        "mamba_proj_bias": False, "max_position_embeddings": 131072, "model_type": "granitemoehybrid",
        "normalization_function": "rmsnorm", "num_attention_heads": 12, "num_experts_per_tok": 6,
        "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64,
        "output_router_logits": False, "pad_token_id": 100256, "position_embedding_type": "nope",
        "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000,
        "router_aux_loss_coef": 0.0001, "shared_intermediate_size": 1024, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352,
    }),
    "Nemotron-H-8B": (8.10, {
        "architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_head_dim": 128, "bos_token_id": 1, "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2,
        "expand": 2, "hidden_dropout": 0.0, "hidden_size": 4096, "head_dim": 128,
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", "initializer_range": 0.02,
        "intermediate_size": 21504, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64, "mamba_hidden_act": "silu",
        "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 8192, "mlp_bias": False,
        "mlp_hidden_act": "relu2", "model_type": "nemotron_h", "n_groups": 8, "num_attention_heads": 32,
        "num_hidden_layers": 52, "num_key_value_heads": 8, "num_logits_to_keep": 1, "pad_token_id": 0,
        "rescale_prenorm_residual": True, "residual_in_fp32": False, "rms_norm_eps": 1e-05,
        "sliding_window": None, "ssm_state_size": 128, "tie_word_embeddings": False, "time_step_floor": 0.0001,
        "time_step_limit": [0.0, float("inf")], "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_rank": 256, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True,
        "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
    }),
    "Zamba-7B-v1": (7.23, {
        "architectures": ["ZambaForCausalLM"], "attention_dropout": 0.0, "attention_head_dim": 464,
        "attention_hidden_size": 7424, "attn_layer_offset": 4, "attn_layer_period": 6, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "gelu", "hidden_mamba_act": "silu", "hidden_size": 3712,
        "initializer_range": 0.02, "intermediate_size": 14848, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_state": 16, "mamba_dt_rank": 232, "mamba_expand": 2, "mamba_proj_bias": False,
        "max_position_embeddings": 4096, "model_type": "zamba", "n_mamba_heads": 2, "num_attention_heads": 16,
        "num_hidden_layers": 76, "num_key_value_heads": 16, "num_logits_to_keep": 1, "pad_token_id": 0,
        "rms_norm_eps": 1e-05, "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001,
        "torch_dtype": "bfloat16", "use_cache": True, "use_mamba_kernels": True, "vocab_size": 32000,
    }),
    "Zamba2-2.7B": (2.662, {
        "adapter_rank": 128, "add_bias_linear": False, "architectures": ["Zamba2ForCausalLM"],
        "attention_dropout": 0.0, "attention_head_dim": 160, "attention_hidden_size": 5120, "bos_token_id": 1,
        "chunk_size": 256, "eos_token_id": 2, "ffn_hidden_size": 10240, "gated_linear_unit": True,
        "hidden_act": "gelu", "hidden_size": 2560, "hybrid_layer_ids": [6, 12, 18, 24, 30, 36, 42, 47, 51],
        "initializer_range": 0.02, "intermediate_size": 10240, "kv_channels": 80,
        "layers_block_type": ["hybrid" if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else "mamba" for i in range(54)],
        "lora_rank": 128, "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_expand": 2, "mamba_headdim": 64,
        "mamba_ngroups": 1, "max_position_embeddings": 4096, "model_type": "zamba2", "n_mamba_heads": 80,
        "num_attention_heads": 32, "num_hidden_layers": 54, "num_key_value_heads": 32, "num_logits_to_keep": 1,
        "num_mem_blocks": 2, "num_query_groups": 32, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 10000,
        "time_step_floor": 0.0001, "time_step_limit": None, "time_step_max": 0.1, "time_step_min": 0.001,
        "torch_dtype": "bfloat16", "use_cache": True, "use_conv_bias": True, "use_long_context": False,
        "use_mamba_kernels": True, "use_mem_rope": False, "use_shared_attention_adapter": False,
        "use_shared_block_lora": True, "vocab_size": 32000,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configuration(name: str, tmp_path: Path) -> None:
    billions, raw = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_config(tmp_path)
    dtype = torch.bfloat16
    model = skeleton(
        config, ops=machine_of("cpu", "reference").ops, weight_dtype=dtype, act_dtype=dtype, conv_dtype=dtype,
        ssm_dtype=torch.float32,
    )  # fmt: skip
    count = sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())
    assert count / 1e9 == pytest.approx(billions, rel=0.006)
    assert config.eos_token_ids
