"""Nemotron-H checkpoints, "puzzle" ones too, whose layers differ in size and which transformers can't load."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from hybrid_cases import Answer, Case
from safetensors.torch import load_file, save_file

from checkpoints import enliven, spread_logits, write_hybrid

_SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"], "intermediate_size": 60,
    "ssm_state_size": 20, "mamba_num_heads": 6, "mamba_head_dim": 10, "n_groups": 2, "chunk_size": 16,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 36, "routed_scaling_factor": 1.4, "rescale_prenorm_residual": False,
}  # fmt: skip
_FINAL_NORM = "model.norm_f.weight"


def write(folder: Path, **overrides: Any) -> Path:
    """Two Mamba-2 layers, one of attention, an MLP and experts."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    return write_hybrid(
        folder, NemotronHConfig, NemotronHForCausalLM, _SIZES | {"final_norm": _FINAL_NORM} | overrides
    )


def limited(folder: Path, dtype: torch.dtype) -> Answer:
    """transformers' class, its steps bounded by ``time_step_limit``.

    transformers 5.24 reads that key and bounds the steps of prompts by ``time_step_min`` instead, and those of
    decoding not at all; NVIDIA's own code bounds by ``time_step_limit`` everywhere.
    """
    from oracle import load_oracle

    model = load_oracle(folder, dtype)
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            layer.mixer.time_step_limit = tuple(model.config.time_step_limit)
    return _answer(model)


def _answer(model: Any) -> Answer:
    def answer(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.double().log_softmax(-1)

    return answer


_BLOCKS: list[dict[str, Any]] = [
    {"block_type": "mamba"},
    {"block_type": "moe", "moe_intermediate_size": 20, "num_experts_per_tok": 3},
    {"block_type": "mamba"},
    {"block_type": "attention"},
    {"block_type": "moe", "moe_intermediate_size": 36, "num_experts_per_tok": 1, "n_routed_experts": 4},
]


def _puzzle() -> Any:
    """transformers' blocks, each built from the configuration with its own numbers."""
    from transformers import NemotronHConfig, NemotronHForCausalLM
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

    sizes = _SIZES | {
        "layers_block_type": [block["block_type"] for block in _BLOCKS],
        "moe_latent_size": 24, "n_group": 2, "topk_group": 1, "vocab_size": 320,
    }  # fmt: skip
    model = NemotronHForCausalLM(NemotronHConfig(**sizes)).eval()
    model.config._experts_implementation = "eager"
    for i, changes in enumerate(_BLOCKS):
        own = copy.deepcopy(model.config)
        for key, value in changes.items():
            if key != "block_type":
                setattr(own, key, value)
        model.model.layers[i] = NemotronHBlock(own, i)
    return model


def write_puzzle(folder: Path) -> Path:
    """A checkpoint whose ``block_configs`` give experts of other widths and numbers to each layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _puzzle()
        enliven(model)
        spread_logits(model, _FINAL_NORM)
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, folder / "model.safetensors")
    config = model.config.to_dict()
    for key in ("layers_block_type", "layer_types", "moe_intermediate_size", "num_experts_per_tok"):
        config.pop(key, None)
    config |= {
        "architectures": ["NemotronHPuzzleForCausalLM"], "model_type": "nemotron_h_puzzle", "block_configs": _BLOCKS,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def puzzle_answer(folder: Path, dtype: torch.dtype) -> Answer:
    """transformers' blocks put together by hand."""
    model = _puzzle()
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name: t.to(dtype) for name, t in stored.items()})
    return _answer(model.to(dtype))


CASES = {
    "nemotron_h": Case(write),
    "nemotron_h-latent": Case(
        lambda folder: write(
            folder, moe_latent_size=24, mlp_bias=True, use_bias=True, use_conv_bias=False, n_group=3, topk_group=2,
            norm_topk_prob=False, time_step_limit=(0.05, 0.2),
        ),
        answer=limited,
    ),
    "nemotron_h-puzzle": Case(write_puzzle, answer=puzzle_answer),
}  # fmt: skip
