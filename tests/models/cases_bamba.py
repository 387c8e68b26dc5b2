"""Bamba checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Three Mamba-2 layers and one of attention; head dims and the state size are no powers of two."""
    from transformers import BambaConfig, BambaForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 4, "attn_layer_indices": [2], "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 60, "mamba_n_heads": 8, "mamba_d_state": 20,
        "mamba_n_groups": 2, "mamba_chunk_size": 16, "final_norm": "model.final_layernorm.weight",
    }  # fmt: skip
    return write_hybrid(folder, BambaConfig, BambaForCausalLM, sizes | overrides)


CASES = {
    "bamba": Case(write),
    "bamba-biases": Case(
        lambda folder: write(
            folder, attention_bias=True, mlp_bias=True, mamba_proj_bias=True, mamba_conv_bias=False,
            tie_word_embeddings=True, time_step_limit=(0.05, 0.2), mamba_n_groups=1,
        )
    ),
}  # fmt: skip
