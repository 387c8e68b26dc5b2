"""Shapes and dtypes of one rank's states: one rank's are the layer's own, and all ranks' together cover the layer."""

from __future__ import annotations

import pytest
import torch

from recurra.cache.spec import (
    MambaStateDtypeCalculator as Dtypes,
)
from recurra.cache.spec import (
    MambaStateShapeCalculator as Shapes,
)
from recurra.cache.spec import (
    delta_state,
    lightning_state,
    mamba1_state,
    mamba2_state,
    short_conv_state,
)
from recurra.errors import ConfigError

BF16 = torch.bfloat16


def test_one_rank_has_the_layers_own_shapes() -> None:
    def of(spec: object) -> list[tuple[int, ...]]:
        return [t.shape for t in spec.tensors[:2]]  # type: ignore[attr-defined]

    assert list(Shapes.mamba1_state_shape(1, 96, 16, 4)) == of(mamba1_state(96, 16, 4, BF16))
    assert list(Shapes.mamba2_state_shape(1, 96, 2, 12, 8, 16, 4)) == of(mamba2_state(12, 8, 2, 16, 4, BF16))
    assert list(Shapes.gated_delta_net_state_shape(1, 2, 4, 8, 6, 4)) == of(delta_state(2, 4, 8, 6, 4, BF16))
    assert list(Shapes.short_conv_state_shape(1, 96, 3)) == of(short_conv_state(96, 3, BF16))[:1]
    assert list(Shapes.linear_attention_state_shape(4, 1, 8)) == of(lightning_state(4, 8, 8))[1:]
    assert Shapes.kda_state_shape(1, 4, 8) == Shapes.gated_delta_net_state_shape(1, 4, 4, 8, 8, 4)


@pytest.mark.parametrize(
    ("groups", "ranks", "extra", "own"),
    [(8, 1, 0, 8), (8, 4, 0, 2), (8, 8, 0, 1), (1, 8, 7, 1), (2, 8, 6, 1)],
)
def test_groups_are_cut_or_copied(groups: int, ranks: int, extra: int, own: int) -> None:
    assert Shapes.extra_groups_for_head_shards(groups, ranks) == extra
    conv, ssm = Shapes.mamba2_state_shape(ranks, 1024, groups, 16, 64, 128, 4, num_spec=2)
    assert conv == (1024 // ranks + 2 * own * 128, 5)
    assert ssm == (16 // ranks, 64, 128)


def test_what_does_not_divide_names_a_size_that_does() -> None:
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: .*num_heads=6.*Use 3"):
        Shapes.mamba2_state_shape(4, 96, 4, 6, 16, 8, 4)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=4: .*n_groups=6.*Use 3"):
        Shapes.mamba2_state_shape(4, 96, 6, 12, 8, 8, 4)


def test_dtypes() -> None:
    assert Dtypes.mamba2_state_dtype(BF16) == (BF16, torch.float32)
    assert Dtypes.mamba1_state_dtype(BF16, "float32", "float16") == (torch.float32, torch.float16)
    assert Dtypes.kda_state_dtype(BF16, "auto", "fp8") == (BF16, torch.float8_e4m3fn)
    assert Dtypes.short_conv_state_dtype(BF16) == (BF16,)
    assert Dtypes.linear_attention_state_dtype(BF16) == (torch.float32,)
    with pytest.raises(ConfigError, match=r"mamba_ssm_cache_dtype='float12'.*Valid: auto, float32"):
        Dtypes.mamba2_state_dtype(BF16, "auto", "float12")
    with pytest.raises(ConfigError, match=r"mamba_cache_dtype='int8': windows"):
        Dtypes.mamba2_state_dtype(BF16, "int8")
