"""Jamba checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Three Mamba layers and one of attention, experts in every other."""
    from transformers import JambaConfig, JambaForCausalLM

    sizes = {
        "hidden_size": 40, "num_hidden_layers": 4, "attn_layer_period": 4, "attn_layer_offset": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 28, "num_experts": 5,
        "mamba_d_state": 11, "mamba_dt_rank": 5, "final_norm": "model.final_layernorm.weight",
    }  # fmt: skip
    return write_hybrid(folder, JambaConfig, JambaForCausalLM, sizes | overrides)


CASES = {
    "jamba": Case(write),
    "jamba-dense": Case(
        lambda folder: write(
            folder, num_experts=1, num_experts_per_tok=1, mamba_proj_bias=True, mamba_conv_bias=False,
            tie_word_embeddings=True,
        )
    ),
}  # fmt: skip
