"""Falcon-H1 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid


def write(folder: Path, **overrides: Any) -> Path:
    """Three layers of Mamba-2 beside attention, every multiplier something else than one."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 60, "mamba_d_ssm": 72, "mamba_n_heads": 6, "mamba_d_state": 20,
        "mamba_n_groups": 2, "mamba_chunk_size": 16, "final_norm": "model.final_layernorm.weight",
        "lm_head_multiplier": 0.7, "embedding_multiplier": 1.9, "mlp_multipliers": [1.3, 0.8],
        "key_multiplier": 0.6, "attention_in_multiplier": 0.9, "attention_out_multiplier": 1.4,
        "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7], "ssm_in_multiplier": 1.2, "ssm_out_multiplier": 0.8,
    }  # fmt: skip
    return write_hybrid(folder, FalconH1Config, FalconH1ForCausalLM, sizes | overrides)


CASES = {
    "falcon_h1": Case(write),
    "falcon_h1-norm-first": Case(
        lambda folder: write(
            folder, mamba_rms_norm=True, mamba_norm_before_gate=True, mamba_d_ssm=None, projectors_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e11},
        )
    ),
    "falcon_h1-gate-first": Case(
        lambda folder: write(
            folder, mamba_rms_norm=True, mamba_norm_before_gate=False, attention_bias=True, mlp_bias=True,
            mamba_proj_bias=True, tie_word_embeddings=True,
        )
    ),
}  # fmt: skip
