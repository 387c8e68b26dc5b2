"""LFM2 checkpoints, without and with experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid

_COMMON = {
    "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "layer_types": ["conv", "conv", "full_attention", "conv"], "final_norm": "model.embedding_norm.weight",
}  # fmt: skip


def write(folder: Path, **overrides: Any) -> Path:
    """Three convolutions and one attention layer."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    return write_hybrid(
        folder,
        Lfm2Config,
        Lfm2ForCausalLM,
        _COMMON | {"intermediate_size": 90, "block_multiple_of": 8} | overrides,
    )


def write_moe(folder: Path, **overrides: Any) -> Path:
    """The same with experts from the second layer on."""
    from transformers import Lfm2MoeConfig, Lfm2MoeForCausalLM

    sizes = {
        "intermediate_size": 60, "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 2,
        "num_dense_layers": 1, "routed_scaling_factor": 1.5,
    }  # fmt: skip
    return write_hybrid(folder, Lfm2MoeConfig, Lfm2MoeForCausalLM, _COMMON | sizes | overrides)


CASES = {
    "lfm2": Case(write),
    "lfm2-biases": Case(
        lambda folder: write(
            folder, conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False, tie_word_embeddings=False
        )
    ),
    "lfm2_moe": Case(write_moe),
    "lfm2_moe-plain": Case(lambda folder: write_moe(folder, use_expert_bias=False, norm_topk_prob=False)),
}
