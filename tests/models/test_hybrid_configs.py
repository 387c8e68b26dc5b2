"""What the hybrids' configurations refuse, and the spellings that they take: each complaint names the key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_published_sizes import PUBLISHED

from recurra.errors import CheckpointError
from recurra.layers.attention import AttentionSizes
from recurra.layers.mamba2 import Mamba2Sizes
from recurra.models import ModelConfig, read_config

GRANITE, NEMOTRON, ZAMBA2 = "granite-4.0-h-tiny", "Nemotron-H-8B", "Zamba2-2.7B"


def read(tmp_path: Path, name: str, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in (PUBLISHED[name][1] | changes).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("Bamba-9B", {"mamba_n_heads": 100}, "mamba_n_heads=100: heads times mamba_d_head must be 8192"),
        ("Bamba-9B", {"mamba_d_head": 32}, "mamba_n_heads=128: heads times mamba_d_head must be 8192"),
        ("Bamba-9B", {"hidden_act": "tanh"}, "hidden_act='tanh': unknown. Known: silu"),
        ("Bamba-9B", {"num_experts": 4}, "num_experts=4: not supported"),
        ("Bamba-9B", {"rope_scaling": {"rope_type": "spiral"}}, "rope_type 'spiral' is unknown"),
        ("Jamba-v0.1", {"attn_layer_offset": 8}, "attn_layer_offset=8: must be below attn_layer_period, 8"),
        ("Jamba-v0.1", {"hidden_act": "gelu"}, "hidden_act='gelu': not supported"),
        ("Falcon-H1-0.5B", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers=.*must be a list of 5 numbers"),
        ("Falcon-H1-0.5B", {"key_multiplier": "big"}, "key_multiplier='big': must be a number"),
        (GRANITE, {"layer_types": ["mamba"]}, "layer_types=.*must be a list of 40 words"),
        (GRANITE, {"layer_types": ["rwkv"] * 40}, "layer_types=.*'rwkv' is unknown. Known: mamba"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type='alibi': unknown"),
        (NEMOTRON, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern='MX': 'X' is unknown"),
        (NEMOTRON, {"hybrid_override_pattern": ...}, "layers_block_type: must list the kind of each layer"),
        (NEMOTRON, {"block_configs": [{"block_type": "moe"}, {}]}, "block_configs=.*None is unknown"),
        (NEMOTRON, {"sliding_window": 4096}, "sliding_window=4096: not supported"),
        (NEMOTRON, {"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu': not supported"),
        ("Zamba-7B-v1", {"attention_hidden_size": 3712}, "attention_hidden_size=3712: must be twice"),
        ("Zamba-7B-v1", {"n_mamba_heads": 3}, "n_mamba_heads=3: must divide 7424"),
        (ZAMBA2, {"layers_block_type": ["mamba"] * 54}, "layers_block_type=.*no layer is hybrid"),
        (ZAMBA2, {"n_mamba_heads": 7}, "n_mamba_heads=7: must divide 5120"),
    ],
)
def test_refused_by_name(name: str, changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=complaint) as error:
        read(tmp_path, name, **changes)
    assert str(tmp_path / "config.json") in str(error.value)


def test_kinds_of_layers_in_words_letters_and_blocks(tmp_path: Path) -> None:
    """The same four layers, however a file lists them, and however many it says there are."""
    kinds = [Mamba2Sizes, AttentionSizes, Mamba2Sizes]
    for listed in (
        {"hybrid_override_pattern": "M*M"},
        {"layers_block_type": ["mamba", "attention", "mamba"], "hybrid_override_pattern": ...},
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "hybrid_override_pattern": ...,
        },
        {"block_configs": [{"block_type": kind} for kind in ("mamba", "attention", "mamba")]},
    ):
        config = read(tmp_path, NEMOTRON, **listed)
        assert config.num_layers == 3
        assert [type(sizes) for sizes in config.sizes.layers] == kinds


def test_sizes_of_single_layers(tmp_path: Path) -> None:
    blocks = [{"block_type": "mlp", "intermediate_size": 7}, {"block_type": "mlp"}]
    layers = read(tmp_path, NEMOTRON, block_configs=blocks).sizes.layers
    assert [sizes.inner for sizes in layers] == [7, 21504]


def test_default_patterns(tmp_path: Path) -> None:
    """Zamba's and Zamba2's files may leave the kinds of layers out."""
    calls = read(tmp_path, "Zamba-7B-v1").sizes.calls
    assert calls[:3] == (2, 7, 13)
    assert len(calls) == 13
    listed = read(tmp_path, ZAMBA2).sizes.calls
    assert read(tmp_path, ZAMBA2, layers_block_type=...).sizes.calls == listed
