"""The keyword arguments of ``LLM(...)``, checked. No torch: the command line reads this for ``--help``.

>>> config = EngineConfig(model="checkpoints/mamba2-130m", max_num_seqs=16)
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import ConfigDict, Field, ValidationError, field_validator

from recurra.config.cache import CacheSettings
from recurra.config.mamba import MambaConfig
from recurra.config.scheduler import SchedulerSettings
from recurra.errors import ConfigError


class EngineConfig(SchedulerSettings, CacheSettings):
    """Everything that ``LLM(...)`` accepts; frozen. Names and meanings are vLLM's where it has them.

    Attributes:
        model: checkpoint folder.
        tokenizer: folder of the tokenizer; None: the checkpoint's.
        skip_tokenizer_init: token ids in, token ids out.
        dtype: precision of the weights; "auto" follows the checkpoint.
        device: "auto", "cpu", "cuda" or "cuda:N".
        load_format: "auto" reads safetensors, "dummy" makes random weights, "pt" reads a pickle.
        seed: of dummy weights and of the seeds given to requests that bring none.
        enforce_eager: run every operator by itself: no fused decode step, no graphs.
        mamba_config: backend of the operators.
        tensor_parallel_size, quantization, speculative_config: not offered yet, refused.
        num_threads: CPU threads; None: all that the process may use.
        chat_template: template text or a file that holds it; None: the tokenizer's.
        generation_config: "auto" takes sampling defaults from the checkpoint's generation_config.json,
            "none" leaves it aside; or another folder with such a file.

    Raises:
        ConfigError: an unknown name (the nearest known one is suggested) or a value out of range.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str = "auto"
    load_format: Literal["auto", "dummy", "pt"] = "auto"
    seed: int = 0
    enforce_eager: bool = False
    mamba_config: MambaConfig | None = None
    tensor_parallel_size: int = Field(default=1, ge=1)
    quantization: str | None = None
    speculative_config: dict[str, Any] | None = None
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    chat_template: str | None = None
    generation_config: str = "auto"

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            _raise_readable(error, type(self))

    @field_validator("model", "tokenizer", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return str(value) if isinstance(value, Path) else value

    @field_validator("dtype", "mamba_cache_dtype", "mamba_ssm_cache_dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: Any) -> Any:
        return str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value


def _raise_readable(error: ValidationError, cls: type[EngineConfig]) -> NoReturn:
    """Turn pydantic's first complaint into ours: name, value, what would work."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"]) or "settings"
    value = first.get("input")
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(sorted(cls.model_fields))}."
        raise ConfigError(name, value, "unknown setting.", hint) from None
    if first["type"] == "missing":
        raise ConfigError(name, None, "it is required.", "Give the checkpoint folder.") from None
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        raise cause from None
    raise ConfigError(name, value, f"{first['msg']}.") from None
