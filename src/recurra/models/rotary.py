"""Rotary positions as configurations describe them."""

from __future__ import annotations

from recurra.layers.rotary import RotarySizes, linear, llama3, plain, yarn, yarn_scale
from recurra.models.config import Fields

_KNOWN = ("default", "linear", "llama3", "yarn")


def read_rotary(
    fields: Fields, head_dim: int, *, partial: float = 1.0, theta: float = 10000.0, interleaved: bool = False
) -> RotarySizes:
    """From ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` in older files.

    Args:
        head_dim: values of a head.
        partial: share of them that turns, when the file doesn't say.
        theta: base of the frequencies, likewise.
        interleaved: pairs are neighbours.

    Raises:
        CheckpointError: a kind of scaling that isn't known.
    """
    key = "rope_parameters" if fields.raw.get("rope_parameters") else "rope_scaling"
    how = fields.section(key)
    kind = str(how.raw.get("rope_type") or how.raw.get("type") or "default")
    base = how.number("rope_theta", fields.number("rope_theta", theta))
    share = how.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial))
    dim = int(head_dim * share)
    frequencies, scale = plain(dim, base), 1.0
    if kind == "linear":
        frequencies = linear(dim, base, how.number("factor", 1.0))
    elif kind == "llama3":
        frequencies = llama3(
            dim, base, how.number("factor", 8.0), how.number("low_freq_factor", 1.0),
            how.number("high_freq_factor", 4.0), _original(how, fields),
        )  # fmt: skip
    elif kind == "yarn":
        original = _original(how, fields)
        factor = how.number("factor", fields.number("max_position_embeddings", original) / original)
        frequencies = yarn(
            dim, base, factor, original, fast=how.number("beta_fast", 32.0), slow=how.number("beta_slow", 1.0),
            truncate=how.flag("truncate", True),
        )  # fmt: skip
        mscale, everywhere = (how.raw.get(name) for name in ("mscale", "mscale_all_dim"))
        scale = how.number("attention_factor", yarn_scale(factor, mscale, everywhere))
    elif kind not in _KNOWN:
        raise fields.wrong(key, f"rope_type {kind!r} is unknown. Known: {', '.join(_KNOWN)}.")
    return RotarySizes(dim, tuple(frequencies.tolist()), scale, interleaved)


def _original(how: Fields, fields: Fields) -> float:
    return how.number("original_max_position_embeddings", fields.number("max_position_embeddings", 8192))
