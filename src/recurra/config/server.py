"""Settings of the HTTP server, frozen. What concerns the model is in the engine's settings."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator, model_validator

from recurra.errors import ConfigError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
UnknownFields = Literal["refuse", "ignore"]


class ServerConfig(BaseModel):
    """How the server listens, whom it lets in, and how it ends.

    Attributes:
        host, port: TCP address; port 0 takes a free one and logs it.
        uds: path of a Unix socket to listen on instead of TCP.
        api_keys: keys that clients may present as ``Authorization: Bearer``; empty lets everybody in.
        served_model_name: names that requests may use; empty is the checkpoint folder's name.
        max_body_bytes: larger request bodies are refused with 413 before they are read whole.
        max_prompts_per_call: prompts in one completions call.
        max_queue_len: requests that may wait before 429 is answered, where the engine's own setting
            names no limit; None: no limit.
        default_chat_max_tokens: answer limit of a chat request that names none, where the checkpoint's
            generation_config.json names none either. A recurrent model has no context limit that would
            end an endless answer, so there is one here; None removes it.
        responses_dir: folder of responses stored by /v1/responses; None: the engine's prefix_cache_dir, and where
            there is none they end with the server.
        responses_days: days that they are kept.
        unknown_fields: "refuse" answers 400 to a request field that nobody knows, as OpenAI does.
        shutdown_timeout: seconds that requests in flight get to finish after the first signal.
        engine_restart_limit: how often in a row an engine that ends within a minute is started again.
        restart_backoff, restart_backoff_max: seconds before the first restart (doubled each time), and
            the most of it.
        log_format, log_level: one line an event, as text or JSON. Prompts and keys are never logged.
        cors_origins: origins that browsers may call from; ("*",) allows all.
        ssl_certfile, ssl_keyfile: PEM files; both or neither.

    Raises:
        ConfigError: a setting that can't work; the message names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = "127.0.0.1"
    port: int = 8000
    uds: Path | None = None
    api_keys: tuple[SecretStr, ...] = ()
    served_model_name: tuple[str, ...] = ()
    max_body_bytes: int = 8 * 1024 * 1024
    max_prompts_per_call: int = 2048
    max_queue_len: int | None = 1024
    default_chat_max_tokens: int | None = 4096
    responses_dir: Path | None = None
    responses_days: float = 30.0
    unknown_fields: UnknownFields = "refuse"
    shutdown_timeout: float = 30.0
    engine_restart_limit: int = 5
    restart_backoff: float = 1.0
    restart_backoff_max: float = 30.0
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    cors_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise _readable(error) from None

    @field_validator("api_keys", "served_model_name", "cors_origins", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value or ()

    @model_validator(mode="after")
    def _workable(self) -> ServerConfig:
        _check(
            0 <= self.port <= 65535, "port", self.port, "no TCP port.", "Use 1 to 65535, or 0 for a free one."
        )
        _check(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "too small for any request.", "Use 1024 or more.")  # fmt: skip
        _check(self.max_prompts_per_call >= 1, "max_prompts_per_call", self.max_prompts_per_call, "no prompt would fit.", "Use 1 or more.")  # fmt: skip
        queue = self.max_queue_len
        _check(queue is None or queue >= 1, "max_queue_len", queue, "no request would fit.", "Use 1 or more, or None.")  # fmt: skip
        limit = self.default_chat_max_tokens
        _check(limit is None or limit >= 1, "default_chat_max_tokens", limit, "no answer would fit.", "Use 1 or more, or None.")  # fmt: skip
        _check(
            self.responses_days > 0,
            "responses_days",
            self.responses_days,
            "nothing would be kept.",
            "Use 30.",
        )
        _check(self.shutdown_timeout >= 0, "shutdown_timeout", self.shutdown_timeout, "negative.", "Use seconds, 0 to end at once.")  # fmt: skip
        _check(self.engine_restart_limit >= 0, "engine_restart_limit", self.engine_restart_limit, "negative.", "Use 0 (never restart) or more.")  # fmt: skip
        _check(0 < self.restart_backoff <= self.restart_backoff_max, "restart_backoff", self.restart_backoff, "not between 0 and restart_backoff_max.", "Use 1.0.")  # fmt: skip
        _check(all(key.get_secret_value().strip() for key in self.api_keys), "api_keys", "''", "an empty key lets everybody in.", "Leave it out for that.")  # fmt: skip
        pair = (self.ssl_certfile is None) == (self.ssl_keyfile is None)
        _check(pair, "ssl_keyfile", self.ssl_keyfile, "ssl_certfile and ssl_keyfile go together.", "Give both or neither.")  # fmt: skip
        for name in ("ssl_certfile", "ssl_keyfile"):
            path = getattr(self, name)
            _check(path is None or path.is_file(), name, str(path), "no such file.", "Give a PEM file.")
        return self


def _check(ok: bool, setting: str, value: Any, problem: str, hint: str) -> None:
    if not ok:
        raise ConfigError(setting, value, problem, hint)


def _readable(error: ValidationError) -> ConfigError:
    """Pydantic's first complaint as ours: name, value, what would work."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    name = str(first["loc"][0]) if first["loc"] else "settings"
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, ServerConfig.model_fields, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(ServerConfig.model_fields)}."
        return ConfigError(name, first["input"], "unknown setting.", hint)
    value = "(hidden)" if name == "api_keys" else first["input"]
    return ConfigError(name, value, f"{first['msg']}.")
