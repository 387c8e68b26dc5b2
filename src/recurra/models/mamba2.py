"""Mamba-2, and Codestral Mamba, which is one."""

from __future__ import annotations

from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.models.config import Fields, Layout, ModelConfig
from recurra.models.family import Build, Family
from recurra.models.maps import mamba2_entries
from recurra.models.stack import OUTER_ENTRIES, TIED, MambaStack
from recurra.models.weights import Entry

#: The layer's keyword arguments in the mamba_ssm package that say something about inference ...
_SIZES = {"layer", "d_state", "d_conv", "expand", "headdim", "ngroups", "bias", "conv_bias", "dt_limit"}
#: ... those that are the same for us at one value only ...
_FIXED = {"rmsnorm": (True,), "norm_before_gate": (False,), "D_has_hdim": (False,), "d_ssm": (None,)}
#: ... and those about initialisation or speed.
_HARMLESS = {
    "A_init_range", "conv_init", "dt_min", "dt_max", "dt_init_floor", "chunk_size", "use_mem_eff_path",
}  # fmt: skip


ENTRIES = (*OUTER_ENTRIES, *mamba2_entries("backbone.layers.{i}.mixer", "layers.{i}.mixer"))


def read_transformers(fields: Fields) -> Mamba2Sizes:
    """Numbers from transformers' ``Mamba2Config``."""
    hidden, inner = fields.whole("hidden_size"), fields.number("expand", 2) * fields.whole("hidden_size")
    sizes = Mamba2Sizes(
        hidden=hidden,
        num_heads=fields.whole("num_heads", 128),
        head_dim=fields.whole("head_dim", 64),
        num_groups=fields.whole("n_groups", 8),
        state_size=fields.whole("state_size", 128),
        conv_kernel=fields.whole("conv_kernel", 4),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        use_bias=fields.flag("use_bias", False),
        use_conv_bias=fields.flag("use_conv_bias", True),
        dt_limit=fields.interval("time_step_limit"),
    )
    if sizes.inner != inner:
        raise fields.wrong(
            "num_heads", f"times head_dim {sizes.head_dim} must be expand * hidden_size = {inner:g}."
        )
    return _checked(sizes, fields, "n_groups", "conv_kernel")


def read_mamba_ssm(fields: Fields) -> Mamba2Sizes:
    """Numbers from the mamba_ssm package's ``ssm_cfg``, with that package's defaults."""
    layer = fields.section("ssm_cfg")
    layer.known(frozenset(_SIZES | _FIXED.keys() | _HARMLESS))
    layer.only(_FIXED)
    return _original(fields, layer, fields.whole("d_model"), "ngroups")


def read_mistral(fields: Fields) -> Mamba2Sizes:
    """Numbers from Codestral Mamba's ``params.json``: all but the groups are mamba_ssm's defaults."""
    groups = Fields({"ngroups": fields.whole("n_groups", 1)}, fields.file)
    return _original(fields, groups, fields.whole("dim"), "n_groups")


def _original(fields: Fields, layer: Fields, hidden: int, groups_key: str) -> Mamba2Sizes:
    inner, head_dim = layer.whole("expand", 2) * hidden, layer.whole("headdim", 64)
    if inner % head_dim:
        raise layer.wrong("headdim", f"must divide expand * d_model = {inner}.")
    sizes = Mamba2Sizes(
        hidden=hidden,
        num_heads=inner // head_dim,
        head_dim=head_dim,
        num_groups=layer.whole("ngroups", 1),
        state_size=layer.whole("d_state", 128),
        conv_kernel=layer.whole("d_conv", 4),
        norm_eps=1e-5,
        use_bias=layer.flag("bias", False),
        use_conv_bias=layer.flag("conv_bias", True),
        dt_limit=layer.interval("dt_limit"),
    )
    return _checked(sizes, fields, groups_key, "d_conv")


def _checked(sizes: Mamba2Sizes, fields: Fields, groups_key: str, conv_key: str) -> Mamba2Sizes:
    if sizes.num_heads % sizes.num_groups:
        raise fields.wrong(
            groups_key, f"{sizes.num_groups} groups can't share {sizes.num_heads} heads evenly."
        )
    if not 2 <= sizes.conv_kernel <= 5:
        raise fields.wrong(conv_key, "convolutions of width 2 to 5 are supported.")
    return sizes


def _build(config: ModelConfig, parts: Build) -> MambaStack:
    sizes = config.sizes
    assert isinstance(sizes, Mamba2Sizes)
    return MambaStack(
        config, lambda: MambaMixer2(sizes, ops=parts.ops, dtypes=parts.dtypes, device=parts.device), parts
    )


def _entries(config: ModelConfig) -> tuple[Entry, ...]:
    return ENTRIES


MAMBA2 = Family(
    read={
        Layout.TRANSFORMERS: read_transformers,
        Layout.MAMBA_SSM: read_mamba_ssm,
        Layout.MISTRAL: read_mistral,
    },
    build=_build,
    entries=_entries,
    tied=TIED,
    tied_default=False,
    residual_in_fp32=True,
)
