"""Granite 4 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Three Mamba-2 layers and one of attention, experts everywhere, multipliers other than one."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 4, "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 28,
        "shared_intermediate_size": 36, "num_local_experts": 6, "num_experts_per_tok": 3, "mamba_n_heads": 8,
        "mamba_d_state": 20, "mamba_n_groups": 2, "mamba_chunk_size": 16, "embedding_multiplier": 1.7,
        "logits_scaling": 1.3, "residual_multiplier": 0.8, "attention_multiplier": 0.4,
        "position_embedding_type": "nope",
    }  # fmt: skip
    return write_hybrid(folder, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, sizes | overrides)


CASES = {
    "granite_moe_hybrid": Case(write),
    "granite_moe_hybrid-dense": Case(
        lambda folder: write(
            folder, num_local_experts=0, position_embedding_type="rope", attention_bias=True,
            mamba_proj_bias=True, tie_word_embeddings=True, mamba_n_groups=1,
        )
    ),
}  # fmt: skip
