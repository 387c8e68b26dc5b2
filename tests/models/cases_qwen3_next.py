"""Qwen3-Next checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Three gated delta nets and one attention layer, two heads of v for one of k, experts in all layers but one."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    sizes = {
        "hidden_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "intermediate_size": 52, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 10, "linear_value_head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3,
        "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "mlp_only_layers": [1],
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    }  # fmt: skip
    return write_hybrid(folder, Qwen3NextConfig, Qwen3NextForCausalLM, sizes | overrides)


CASES = {
    "qwen3_next": Case(write),
    "qwen3_next-plain": Case(
        lambda folder: write(
            folder, attention_bias=True, tie_word_embeddings=True, norm_topk_prob=False, decoder_sparse_step=2,
            mlp_only_layers=[], linear_num_value_heads=2, linear_conv_kernel_dim=3, layer_types=None,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        )
    ),
}  # fmt: skip
