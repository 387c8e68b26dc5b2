"""Mamba, and FalconMamba, which adds norms without weights on B, C and dt."""

from __future__ import annotations

import math

from recurra.layers.mamba1 import Mamba1Sizes, MambaMixer
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.maps import mamba1_entries
from recurra.models.stack import OUTER_ENTRIES, TIED, MambaStack
from recurra.models.weights import Entry

#: The layer's keyword arguments in the mamba_ssm package that say something about inference ...
_SIZES = {"layer", "d_state", "d_conv", "expand", "dt_rank", "bias", "conv_bias"}
#: ... and those about initialisation or speed.
_HARMLESS = {"dt_min", "dt_max", "dt_init", "dt_scale", "dt_init_floor", "use_fast_path"}


ENTRIES = (*OUTER_ENTRIES, *mamba1_entries("backbone.layers.{i}.mixer", "layers.{i}.mixer"))


def read_transformers(fields: Fields) -> Mamba1Sizes:
    """Numbers from transformers' ``MambaConfig``."""
    return _from_transformers(fields, None)


def read_falcon(fields: Fields) -> Mamba1Sizes:
    """Numbers from transformers' ``FalconMambaConfig``; the norms are always there, only their eps is set."""
    return _from_transformers(fields, fields.number("mixer_rms_eps", 1e-6))


def _from_transformers(fields: Fields, bcdt_norm_eps: float | None) -> Mamba1Sizes:
    hidden = fields.whole("hidden_size")
    # Where both are given the width itself decides: FalconMamba-7B says expand 16 and 8192 of 4096 * 16.
    channels = fields.whole("intermediate_size", int(fields.number("expand", 2) * hidden))
    sizes = Mamba1Sizes(
        hidden=hidden,
        channels=channels,
        state_size=fields.whole("state_size", 16),
        conv_kernel=fields.whole("conv_kernel", 4),
        dt_rank=_dt_rank(fields, "time_step_rank", hidden),
        use_bias=fields.flag("use_bias", False),
        use_conv_bias=fields.flag("use_conv_bias", True),
        bcdt_norm_eps=bcdt_norm_eps,
    )
    return _checked(sizes, fields, "conv_kernel")


def read_mamba_ssm(fields: Fields) -> Mamba1Sizes:
    """Numbers from the mamba_ssm package's ``ssm_cfg``, with that package's defaults."""
    layer = fields.section("ssm_cfg")
    layer.known(frozenset(_SIZES | _HARMLESS))
    hidden = fields.whole("d_model")
    sizes = Mamba1Sizes(
        hidden=hidden,
        channels=layer.whole("expand", 2) * hidden,
        state_size=layer.whole("d_state", 16),
        conv_kernel=layer.whole("d_conv", 4),
        dt_rank=_dt_rank(layer, "dt_rank", hidden),
        use_bias=layer.flag("bias", False),
        use_conv_bias=layer.flag("conv_bias", True),
    )
    return _checked(sizes, layer, "d_conv")


def _dt_rank(fields: Fields, key: str, hidden: int) -> int:
    if fields.raw.get(key, "auto") == "auto":
        return math.ceil(hidden / 16)
    return fields.whole(key)


def _checked(sizes: Mamba1Sizes, fields: Fields, conv_key: str) -> Mamba1Sizes:
    if not 2 <= sizes.conv_kernel <= 5:
        raise fields.wrong(conv_key, "convolutions of width 2 to 5 are supported.")
    return sizes


def _build(config: ModelConfig, parts: Build) -> MambaStack:
    sizes = config.sizes
    assert isinstance(sizes, Mamba1Sizes)
    return MambaStack(
        config, lambda: MambaMixer(sizes, ops=parts.ops, dtypes=parts.dtypes, device=parts.device), parts
    )


def _entries(config: ModelConfig) -> tuple[Entry, ...]:
    return ENTRIES


MAMBA = Family(
    read={Layout.TRANSFORMERS: read_transformers, Layout.MAMBA_SSM: read_mamba_ssm},
    build=_build,
    entries=_entries,
    tied=TIED,
    tied_default=True,
    residual_in_fp32=True,
)
FALCON_MAMBA = Family(
    read={Layout.TRANSFORMERS: read_falcon},
    build=_build,
    entries=_entries,
    tied=TIED,
    tied_default=True,
    residual_in_fp32=True,
)
