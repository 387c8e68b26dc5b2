"""Configurations of each layout: numbers read right, and what isn't supported refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoints
from recurra.errors import CheckpointError, UnknownArchitectureError
from recurra.layers.mamba1 import Mamba1Sizes
from recurra.layers.mamba2 import Mamba2Sizes
from recurra.models import ARCHITECTURES, ModelConfig, read_config

MAMBA2 = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "vocab_size": 320, "hidden_size": 48,
    "num_hidden_layers": 3, "num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 20, "expand": 2,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "vocab_size": 320, "hidden_size": 40, "num_hidden_layers": 3}
ORIGINAL = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}}
CODESTRAL = {
    "dim": 4096, "n_layers": 64, "vocab_size": 32768, "n_groups": 8, "rms_norm": True,
    "residual_in_fp32": True, "fused_add_norm": True, "pad_vocab_size_multiple": 1,
    "tie_embeddings": False, "model_type": "mamba",
}  # fmt: skip


def read(folder: Path, raw: dict[str, Any], name: str = "config.json") -> ModelConfig:
    (folder / name).write_text(json.dumps(raw))
    return read_config(folder)


def mamba1(config: ModelConfig) -> Mamba1Sizes:
    assert isinstance(config.sizes, Mamba1Sizes)
    return config.sizes


def mamba2(config: ModelConfig) -> Mamba2Sizes:
    assert isinstance(config.sizes, Mamba2Sizes)
    return config.sizes


def test_transformers_mamba2(tmp_path: Path) -> None:
    config = read(
        tmp_path,
        MAMBA2
        | {"time_step_limit": [0.01, {"__float__": "Infinity"}], "dtype": "bfloat16", "use_bias": True}
        | {"layer_norm_epsilon": 1e-6, "eos_token_id": [2, 7], "bos_token_id": 1},
    )
    want = Mamba2Sizes(48, 8, 12, 2, 20, 4, 1e-6, use_bias=True, dt_limit=(0.01, math.inf))
    assert mamba2(config) == want
    assert (config.torch_dtype, config.norm_eps) == (torch.bfloat16, 1e-6)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 7))
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (320, 48, 3)
    assert not config.tie_word_embeddings
    assert config.max_length is None


@pytest.mark.parametrize(
    "write", [checkpoints.write_mamba, checkpoints.write_falcon_mamba, checkpoints.write_mamba2]
)
def test_what_transformers_itself_writes(tmp_path: Path, write: Any) -> None:
    config = read_config(write(tmp_path, dtype=torch.float16))
    assert config.torch_dtype == torch.float16
    assert config.eos_token_ids == (0,)
    assert config.tie_word_embeddings == (write is not checkpoints.write_mamba2)


def test_falcon_mamba_has_norms_and_mamba_has_none(tmp_path: Path) -> None:
    assert mamba1(read(tmp_path, MAMBA)).bcdt_norm_eps is None
    falcon = MAMBA | {"model_type": "falcon_mamba"}
    assert mamba1(read(tmp_path, falcon)).bcdt_norm_eps == 1e-6
    assert mamba1(read(tmp_path, falcon | {"mixer_rms_eps": 1e-5})).bcdt_norm_eps == 1e-5


def test_width_given_twice(tmp_path: Path) -> None:
    """FalconMamba-7B's file says expand 16 and intermediate_size 2 * hidden_size; transformers takes the latter."""
    raw = MAMBA | {"expand": 16, "intermediate_size": 80}
    assert mamba1(read(tmp_path, raw)).channels == 80
    from transformers import MambaConfig

    assert MambaConfig(**{k: v for k, v in raw.items() if k != "model_type"}).intermediate_size == 80


def test_dt_rank(tmp_path: Path) -> None:
    assert mamba1(read(tmp_path, MAMBA)).dt_rank == 3  # ceil(40 / 16)
    assert mamba1(read(tmp_path, MAMBA | {"time_step_rank": "auto"})).dt_rank == 3
    assert mamba1(read(tmp_path, MAMBA | {"time_step_rank": 7})).dt_rank == 7


def test_no_architectures(tmp_path: Path) -> None:
    raw = {k: v for k, v in MAMBA2.items() if k != "architectures"}
    for missing in ({}, {"architectures": None}, {"architectures": []}):
        assert read(tmp_path, raw | missing).architecture == "Mamba2ForCausalLM"


@pytest.mark.parametrize(
    "raw",
    [
        MAMBA2 | {"architectures": ["LlamaForCausalLM"]},
        {"model_type": "llama"},
        ORIGINAL | {"ssm_cfg": {"layer": "Mamba3"}},
        CODESTRAL | {"model_type": "transformer"},
    ],
)
def test_unknown_architecture_lists_the_known(tmp_path: Path, raw: dict[str, Any]) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        read(tmp_path, raw)
    for name in ARCHITECTURES:
        assert name in str(caught.value)


def test_mamba_ssm_mamba2(tmp_path: Path) -> None:
    """The published 130M checkpoint: sizes come from that package's defaults, not another model's."""
    config = read(tmp_path, ORIGINAL | {"pad_vocab_size_multiple": 16})
    assert mamba2(config) == Mamba2Sizes(768, 24, 64, 1, 128, 4, 1e-5)
    assert (config.vocab_size, config.tie_word_embeddings) == (50288, True)
    assert config.torch_dtype == torch.float32
    assert config.eos_token_ids == ()


def test_mamba_ssm_mamba(tmp_path: Path) -> None:
    raw = {"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {}, "rms_norm": True}
    config = read(tmp_path, raw)
    assert mamba1(config) == Mamba1Sizes(768, 1536, 16, 4, 48)
    assert config.architecture == "MambaForCausalLM"
    assert config.vocab_size == 50280


def test_codestral(tmp_path: Path) -> None:
    config = read(tmp_path, CODESTRAL, "params.json")
    assert mamba2(config) == Mamba2Sizes(4096, 128, 64, 8, 128, 4, 1e-5)
    assert (config.vocab_size, config.num_layers, config.tie_word_embeddings) == (32768, 64, False)


def test_stored_format_is_read_when_the_configuration_is_silent(tmp_path: Path) -> None:
    source = checkpoints.write_mamba2(tmp_path / "a", dtype=torch.bfloat16)
    config = read_config(checkpoints.write_mamba_ssm(source, tmp_path / "b"))
    assert config.torch_dtype == torch.bfloat16


def test_state_format_that_the_checkpoint_insists_on(tmp_path: Path) -> None:
    assert read(tmp_path, MAMBA2).ssm_dtype is None
    assert read(tmp_path, MAMBA2 | {"mamba_ssm_cache_dtype": "float16"}).ssm_dtype == torch.float16


def test_end_tokens_of_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert read(tmp_path, MAMBA2 | {"eos_token_id": 7}).eos_token_ids == (5, 2)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.7}')
    assert read(tmp_path, MAMBA2 | {"eos_token_id": 7}).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (MAMBA2 | {"hidden_act": "gelu"}, r"hidden_act='gelu': not supported; it works with 'silu'"),
        (MAMBA2 | {"norm_before_gate": True}, r"norm_before_gate=True: not supported"),
        (MAMBA2 | {"rms_norm": False}, r"rms_norm=False: not supported"),
        (
            MAMBA2 | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quant_method='gptq': unknown.*Known: fp8, fbgemm_fp8, compressed-tensors",
        ),
        (MAMBA2 | {"embedding_multiplier": 5.6}, r"embedding_multiplier=5\.6: not supported"),
        (MAMBA2 | {"lm_head_multiplier": 0.039}, r"lm_head_multiplier=0\.039: not supported"),
        (MAMBA2 | {"attn_layer_indices": [2]}, r"attn_layer_indices=\[2\]: not supported"),
        (
            MAMBA2 | {"time_step_limit": [1.0, 0.5]},
            r"time_step_limit=\[1\.0, 0\.5\]: the lower bound is above",
        ),
        (MAMBA2 | {"time_step_limit": 3}, r"time_step_limit=3: must be two numbers"),
        (MAMBA2 | {"time_step_limit": [0, "wide"]}, r"time_step_limit=.*: must be a number"),
        (MAMBA2 | {"num_heads": 7}, r"num_heads=7: times head_dim 12 must be expand \* hidden_size = 96"),
        (MAMBA2 | {"n_groups": 3}, r"n_groups=3: 3 groups can't share 8 heads"),
        (MAMBA2 | {"conv_kernel": 1}, r"conv_kernel=1: convolutions of width 2 to 5"),
        (MAMBA2 | {"hidden_size": None}, r"hidden_size=None: missing"),
        (MAMBA2 | {"hidden_size": "48"}, r"hidden_size='48': must be a whole number"),
        (MAMBA2 | {"vocab_size": 0}, r"vocab_size=0: must be a whole number of at least 1"),
        (MAMBA2 | {"use_bias": "no"}, r"use_bias='no': must be true or false"),
        (MAMBA2 | {"dtype": "int8"}, r"dtype='int8': unknown number format"),
        (MAMBA2 | {"eos_token_id": "</s>"}, r"eos_token_id='</s>': must be a token id"),
        (MAMBA | {"conv_kernel": 6}, r"conv_kernel=6: convolutions of width 2 to 5"),
        (
            ORIGINAL | {"ssm_cfg": {"layer": "Mamba2", "d_sate": 64}},
            r"d_sate=64: unknown setting\. Known: .*d_state",
        ),
        (ORIGINAL | {"ssm_cfg": {"layer": "Mamba2", "rmsnorm": False}}, r"rmsnorm=False: not supported"),
        (ORIGINAL | {"ssm_cfg": {"layer": "Mamba2", "D_has_hdim": True}}, r"D_has_hdim=True: not supported"),
        (ORIGINAL | {"ssm_cfg": {"layer": "Mamba2", "headdim": 100}}, r"headdim=100: must divide .* 1536"),
        (ORIGINAL | {"ssm_cfg": "Mamba2"}, r"ssm_cfg='Mamba2': must be an object"),
        (ORIGINAL | {"rms_norm": False}, r"rms_norm=False: not supported"),
        (ORIGINAL | {"attn_layer_idx": [9, 18]}, r"attn_layer_idx=\[9, 18\]: not supported"),
        (ORIGINAL | {"d_intermediate": 1024}, r"d_intermediate=1024: not supported"),
        ({"hidden": 3}, "no known layout"),
        ([1], "must hold a JSON object"),
        (MAMBA2 | {"architectures": ["FalconMambaForCausalLM"], "vocab_size": True}, "vocab_size=True"),
    ],
)
def test_refused_by_name(tmp_path: Path, raw: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(tmp_path, raw)
    assert "config.json" in str(caught.value)


def test_harmless_keys_are_allowed(tmp_path: Path) -> None:
    harmless = {
        "transformers_version": "4.39", "rescale_prenorm_residual": True, "time_step_max": 0.2,
        "use_mambapy": True, "_name_or_path": "x", "hidden_act": "silu", "norm_before_gate": False,
    }  # fmt: skip
    assert read(tmp_path, MAMBA2 | harmless) == read(tmp_path, MAMBA2)


def test_broken_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json can't be read as JSON"):
        read_config(tmp_path)
