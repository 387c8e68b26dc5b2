"""Zamba and Zamba2 checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybrid_cases import Case

from checkpoints import write_hybrid

_OUTER = {"hidden_size": 48, "num_attention_heads": 4, "final_norm": "model.final_layernorm.weight"}


def write_zamba(folder: Path, **overrides: Any) -> Path:
    """Five Mamba layers with two heads each, three of them after a call of the shared block."""
    from transformers import ZambaConfig, ZambaForCausalLM

    sizes = {
        "num_hidden_layers": 5, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
        "num_key_value_heads": 2, "intermediate_size": 60, "mamba_d_state": 11, "mamba_dt_rank": 5,
    }  # fmt: skip
    return write_hybrid(folder, ZambaConfig, ZambaForCausalLM, _OUTER | sizes | overrides)


def write_zamba2(folder: Path, **overrides: Any) -> Path:
    """Six Mamba-2 layers; two shared blocks, called twice and once."""
    from transformers import Zamba2Config, Zamba2ForCausalLM

    sizes = {
        "num_hidden_layers": 6, "layers_block_type": ["mamba", "hybrid", "hybrid", "mamba", "hybrid", "mamba"],
        "num_key_value_heads": 4, "intermediate_size": 60, "mamba_d_state": 20, "mamba_ngroups": 2,
        "n_mamba_heads": 8, "chunk_size": 16, "num_mem_blocks": 2, "adapter_rank": 6,
        "use_shared_attention_adapter": True, "use_mem_rope": True,
    }  # fmt: skip
    return write_hybrid(folder, Zamba2Config, Zamba2ForCausalLM, _OUTER | sizes | overrides)


CASES = {
    "zamba": Case(write_zamba),
    "zamba-biases": Case(
        lambda folder: write_zamba(
            folder, mamba_proj_bias=True, mamba_conv_bias=False, n_mamba_heads=3
        )
    ),
    "zamba2": Case(write_zamba2),
    "zamba2-plain": Case(
        lambda folder: write_zamba2(
            folder, use_shared_attention_adapter=False, use_mem_rope=False, num_mem_blocks=1,
            add_bias_linear=True, num_key_value_heads=2, time_step_min=0.05, mamba_ngroups=1,
        )
    ),
}  # fmt: skip
