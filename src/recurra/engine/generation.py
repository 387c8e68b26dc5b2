"""Sampling defaults that a checkpoint brings in ``generation_config.json``.

They stand behind what a caller gives, field by field, and before the defaults of ``SamplingParams``:

>>> defaults = read_sampling_defaults(EngineConfig(model="checkpoints/mamba2-130m"))
>>> params = SamplingParams(**merged(defaults, {"temperature": 0.0}))
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recurra.config.engine import EngineConfig
from recurra.errors import CheckpointError, ConfigError, RequestError
from recurra.sampling_params import SamplingParams

log = logging.getLogger("recurra")

FILE = "generation_config.json"
#: Field of the file to field of ``SamplingParams``.
_TAKEN = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
}  # fmt: skip
#: Fields that change what is generated and have no counterpart here, each with the value that asks for nothing.
_NOT_TAKEN: Mapping[str, float | None] = {
    "num_beams": 1, "typical_p": 1.0, "top_h": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0,
    "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1.0, "guidance_scale": 1.0,
    "penalty_alpha": None, "stop_strings": None, "bad_words_ids": None, "force_words_ids": None,
    "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "sequence_bias": None, "exponential_decay_length_penalty": None,
    "watermarking_config": None, "dola_layers": None,
}  # fmt: skip


def read_sampling_defaults(config: EngineConfig) -> dict[str, Any]:
    """Fields of ``SamplingParams`` that the checkpoint's file sets; empty where there is no file.

    ``do_sample`` false means greedy, whatever temperature the file names beside it.

    Raises:
        CheckpointError: the file can't be read, or a value can't work; it names file, field and value.
        ConfigError: ``generation_config`` is neither a keyword nor a folder with such a file.
    """
    path = _path(config)
    content = {} if path is None else _content(path)
    found = {
        name: _checked(path, field, name, content[field])
        for field, name in _TAKEN.items()
        if content.get(field) is not None
    }
    sampled = content.get("do_sample")
    if sampled is not None and not isinstance(sampled, bool):
        raise _bad(path, "do_sample", sampled, "must be true or false")
    if sampled is False:
        found["temperature"] = 0.0
    if found.get("min_tokens", 0) > found.get("max_tokens", found.get("min_tokens", 0)):
        raise _bad(path, "min_new_tokens", found["min_tokens"], "must not exceed max_new_tokens")
    _warn(path, content)
    return found


def shown(defaults: Mapping[str, Any]) -> str:
    """The defaults for a reader: ``temperature 0.7, top_p 0.9``."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items())


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields for ``SamplingParams``: what the caller gave wins, field by field.

    A ``min_tokens`` that only the file asks for gives way to a smaller ``max_tokens``.
    """
    fields = {**defaults, **given}
    most = fields.get("max_tokens")
    if "min_tokens" in defaults and "min_tokens" not in given and most is not None:
        fields["min_tokens"] = min(defaults["min_tokens"], most)
    return fields


def _path(config: EngineConfig) -> Path | None:
    """The file to read, if any."""
    asked = config.generation_config
    if asked == "none":
        return None
    if asked == "auto":
        path = Path(config.model) / FILE
        return path if path.is_file() else None
    path = Path(asked).expanduser() / FILE
    if not path.is_file():
        raise ConfigError(
            "generation_config", asked, f"no folder with a {FILE}.",
            'Use "auto" (the checkpoint\'s), "none", or such a folder.',
        )  # fmt: skip
    return path


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def _checked(path: Path | None, field: str, name: str, value: Any) -> Any:
    """The value as ``SamplingParams`` takes it."""
    fields: dict[str, Any] = {"max_tokens": None, name: value}
    try:
        settled = getattr(SamplingParams(**fields), name)
    except RequestError as error:
        need = str(error).removeprefix(f"{name} ").rpartition(", got")[0]
        raise _bad(path, field, value, need) from None
    if name == "max_tokens" and settled < 1:
        raise _bad(path, field, value, "must be at least 1")
    return settled


def _bad(path: Path | None, field: str, value: Any, need: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {field} {need}, got {value!r:.80}. Correct the file, or set generation_config (flag "
        '--generation-config) to "none" to leave it aside.'
    )


def _warn(path: Path | None, content: Mapping[str, Any]) -> None:
    """Name what the file asks for and nobody will do."""
    wanted = [
        f"{name} {content[name]!r:.40}"
        for name, neutral in _NOT_TAKEN.items()
        if content.get(name) and content[name] != neutral
    ]
    if wanted:
        log.warning("%s: not supported and left aside: %s", path, ", ".join(wanted))
