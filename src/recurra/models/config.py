"""What a checkpoint's configuration says, read once into frozen numbers.

Three layouts are known: transformers' (``config.json`` with ``model_type``), that of the ``mamba_ssm``
package (``config.json`` with ``d_model`` and ``n_layer``) and Mistral's (``params.json`` with ``dim`` and
``n_layers``). A family's file says how its own numbers are read from each.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch

from recurra.errors import CheckpointError
from recurra.models.quant import Quantisation, read_quantisation


class Layout(Enum):
    """Who wrote the folder: it decides how settings and weight files are named."""

    TRANSFORMERS = "transformers"
    MAMBA_SSM = "mamba_ssm"
    MISTRAL = "mistral"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A checkpoint's numbers.

    Attributes:
        path: its folder.
        layout: who wrote it.
        architecture: name in :data:`recurra.models.ARCHITECTURES`.
        vocab_size: rows of the embedding and of the head, padding rows included.
        hidden_size: width of the residual stream.
        num_layers: blocks.
        norm_eps: epsilon of the blocks' and the final norm.
        tie_word_embeddings: the head's table is the embedding's.
        residual_in_fp32: the residual stream stays float32 when activations are narrower.
        torch_dtype: of the stored weights.
        ssm_dtype: of the recurrent states, when the checkpoint insists (``mamba_ssm_cache_dtype``).
        bos_token_id: token that begins a text, or None.
        eos_token_ids: tokens that end one, perhaps none.
        max_length: tokens that the checkpoint claims to handle, or None: a recurrent model has no limit.
        sizes: the family's numbers, read by its own file.
        quantisation: how weights are stored, None where they are plain.
    """

    path: Path
    layout: Layout
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    norm_eps: float
    tie_word_embeddings: bool
    residual_in_fp32: bool
    torch_dtype: torch.dtype
    ssm_dtype: torch.dtype | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    max_length: int | None
    sizes: Any
    quantisation: Quantisation | None = None


_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_DTYPES["float64"] = torch.float64


class Fields:
    """Typed reading of a configuration file; each complaint names file, key and value."""

    def __init__(self, raw: dict[str, Any], file: Path) -> None:
        self.raw = raw
        self.file = file

    def wrong(self, key: str, problem: str) -> CheckpointError:
        """The error for one key's value."""
        value = f"={self.raw[key]!r}" if key in self.raw else ""
        return CheckpointError(f"{self.file}: {key}{value}: {problem}")

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least ``least``; without a default the key must be there."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(key, f"must be a whole number of at least {least}.")
        return value

    def number(self, key: str, default: float) -> float:
        """A number."""
        return self.as_float(key, self._value(key, default))

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "must be true or false.")
        return value

    def number_format(self, *keys: str) -> torch.dtype | None:
        """A number format under the first of ``keys`` that is there; None when none is."""
        for key in keys:
            value = self.raw.get(key)
            if value in (None, "auto"):
                continue
            name = str(value).removeprefix("torch.")
            if name not in _DTYPES:
                raise self.wrong(key, f"unknown number format. Known: {', '.join(_DTYPES)}.")
            return _DTYPES[name]
        return None

    def ids(self, key: str) -> tuple[int, ...]:
        """Token ids, given as one number, a list, null or nothing."""
        value = self.raw.get(key)
        if value is None:
            return ()
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
            raise self.wrong(key, "must be a token id or a list of token ids.")
        return tuple(values)

    def section(self, key: str) -> Fields:
        """A nested object, empty when it is absent."""
        value = self.raw.get(key) or {}
        if not isinstance(value, dict):
            raise self.wrong(key, "must be an object.")
        return Fields(value, self.file)

    def over(self, changes: dict[str, Any]) -> Fields:
        """The same with other values of some keys."""
        return Fields(self.raw | changes, self.file)

    def inside(self, key: str) -> Fields:
        """A nested object with what surrounds it: its keys go before those around; all of them without it."""
        around = {name: value for name, value in self.raw.items() if name != key}
        return Fields(around | self.section(key).raw, self.file)

    def choice(self, key: str, known: Collection[str], default: str | None = None) -> str:
        """One of the ``known`` words; without a default the key must be there."""
        value = self._value(key, default)
        if not isinstance(value, str) or value not in known:
            raise self.wrong(key, f"unknown. Known: {', '.join(known)}.")
        return value

    def choices(self, key: str, known: Collection[str], count: int) -> tuple[str, ...]:
        """A list of ``count`` of the ``known`` words, such as one kind a layer."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, f"must be a list of {count} words.")
        for word in value:
            if word not in known:
                raise self.wrong(key, f"{word!r} is unknown. Known: {', '.join(known)}.")
        return tuple(value)

    def numbers(self, key: str, count: int, default: Sequence[float] | None = None) -> tuple[float, ...]:
        """A list of ``count`` numbers; without a default the key must be there."""
        value = self._value(key, None if default is None else list(default))
        if not isinstance(value, list) or len(value) != count:
            raise self.wrong(key, f"must be a list of {count} numbers.")
        return tuple(self.as_float(key, number) for number in value)

    def interval(self, key: str) -> tuple[float, float]:
        """Two bounds; transformers writes infinity as ``{"__float__": "Infinity"}``."""
        value = self._value(key, [0.0, float("inf")])
        if not isinstance(value, (list, tuple)) or len(value) != 2:
            raise self.wrong(key, "must be two numbers.")
        low, high = (self.as_float(key, bound) for bound in value)
        if not low <= high:
            raise self.wrong(key, "the lower bound is above the upper.")
        return low, high

    def as_float(self, key: str, value: Any) -> float:
        """``value`` as a number, however JSON spells it."""
        if isinstance(value, dict):
            value = value.get("__float__")
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self.wrong(key, "must be a number.") from None

    def only(self, supported: dict[str, tuple[Any, ...]]) -> None:
        """Refuse keys whose value asks for mathematics that isn't here.

        Args:
            supported: for each such key the values that change nothing; the first is named as the way out.
        """
        for key, values in supported.items():
            if key in self.raw and self.raw[key] not in (None, *values):
                raise self.wrong(key, f"not supported; it works with {values[0]!r}.")

    def known(self, keys: frozenset[str]) -> None:
        """Refuse every key outside ``keys``."""
        for key in sorted(set(self.raw) - keys):
            raise self.wrong(key, f"unknown setting. Known: {', '.join(sorted(keys))}.")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key, default)
        if value is None:
            raise self.wrong(key, "missing.")
        return value


#: Keys of transformers' configurations that would change the mathematics, with the values that don't.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "norm_before_gate": (False,),
    "rms_norm": (True,),
    "attn_layer_idx": ([],),
    "attn_layer_indices": ([],),
    "num_experts": (1, 0),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "logits_scaling": (1.0,),
    "lm_head_multiplier": (1.0,),
    "ssm_multipliers": (None,),
    "scale_embeddings": (False,),
    "final_logit_softcapping": (None,),
}


def read_fields(path: Path) -> tuple[Layout, Fields]:
    """Find and read the folder's configuration.

    Raises:
        CheckpointError: no such folder, no configuration, no JSON, or none of the three layouts.
    """
    if not path.exists():
        raise CheckpointError(
            f"model folder {path} does not exist; give the path of a downloaded checkpoint folder."
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; give the folder that holds it and its config.json.")
    for name in ("config.json", "params.json"):
        if (path / name).is_file():
            fields = Fields(read_json(path / name), path / name)
            return _layout(fields), fields
    raise CheckpointError(f"{path} has neither config.json nor params.json.")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file} must hold a JSON object, and holds a {type(raw).__name__}.")
    return raw


def _layout(fields: Fields) -> Layout:
    keys = fields.raw.keys()
    if {"dim", "n_layers"} <= keys:
        return Layout.MISTRAL
    if {"d_model", "n_layer"} <= keys:
        return Layout.MAMBA_SSM
    if keys & {"architectures", "model_type"}:
        return Layout.TRANSFORMERS
    raise CheckpointError(
        f"{fields.file}: no known layout; it needs model_type (transformers), d_model and n_layer"
        " (mamba_ssm) or dim and n_layers (params.json)."
    )


@dataclass(frozen=True, slots=True)
class Names:
    """How one layout calls the numbers that every model has, and which settings it must not change."""

    hidden_size: str
    num_layers: str
    tied: str
    unsupported: dict[str, tuple[Any, ...]]


_ORIGINAL = {
    "rms_norm": (True,),
    "d_intermediate": (0,),
    "attn_layer_idx": ([],),
    "quantization_config": (None,),
}
NAMES = {
    Layout.TRANSFORMERS: Names("hidden_size", "num_hidden_layers", "tie_word_embeddings", UNSUPPORTED),
    Layout.MAMBA_SSM: Names("d_model", "n_layer", "tie_embeddings", _ORIGINAL),
    Layout.MISTRAL: Names("dim", "n_layers", "tie_embeddings", _ORIGINAL),
}


def model_config(
    layout: Layout,
    fields: Fields,
    *,
    architecture: str,
    tied_default: bool,
    residual_default: bool,
    torch_dtype: torch.dtype,
    sizes: Any,
) -> ModelConfig:
    """Join what every model has with its family's numbers.

    Args:
        tied_default: whether the head is the embedding when a transformers file doesn't say; in the
            original layouts it then is.
        residual_default: whether the residual stream stays float32 when the file doesn't say.
        sizes: the family's numbers.
        torch_dtype: of the stored weights.
    """
    names, path = NAMES[layout], fields.file.parent
    return ModelConfig(
        path=path,
        layout=layout,
        architecture=architecture,
        vocab_size=_vocabulary(layout, fields),
        hidden_size=fields.whole(names.hidden_size),
        num_layers=fields.whole(names.num_layers),
        norm_eps=_norm_eps(fields),
        tie_word_embeddings=fields.flag(names.tied, tied_default or layout is not Layout.TRANSFORMERS),
        residual_in_fp32=fields.flag("residual_in_fp32", residual_default),
        torch_dtype=torch_dtype,
        ssm_dtype=fields.number_format("mamba_ssm_cache_dtype"),
        bos_token_id=next(iter(fields.ids("bos_token_id")), None),
        eos_token_ids=_end_tokens(path, fields),
        max_length=_max_length(fields),
        sizes=sizes,
        quantisation=read_quantisation(fields),
    )


def _norm_eps(fields: Fields) -> float:
    """Epsilon of the blocks' norms, under whichever name."""
    names = ("layer_norm_epsilon", "rms_norm_eps", "norm_eps", "layer_norm_eps")
    found = next((name for name in names if fields.raw.get(name) is not None), names[0])
    return fields.number(found, 1e-5)


def _vocabulary(layout: Layout, fields: Fields) -> int:
    """Rows of the embedding: the original layouts round the vocabulary up to a multiple."""
    size = fields.whole("vocab_size")
    if layout is Layout.TRANSFORMERS:
        return size
    multiple = fields.whole("pad_vocab_size_multiple", 8)
    return -(-size // multiple) * multiple


def _end_tokens(path: Path, fields: Fields) -> tuple[int, ...]:
    """Tokens that end a text: those of generation_config.json, else those of the configuration."""
    generation = path / "generation_config.json"
    named = Fields(read_json(generation), generation).ids("eos_token_id") if generation.is_file() else ()
    return tuple(dict.fromkeys(named or fields.ids("eos_token_id")))


def _max_length(fields: Fields) -> int | None:
    for key in ("max_position_embeddings", "max_seq_len"):
        if fields.raw.get(key) is not None:
            return fields.whole(key)
    return None
