"""ServerConfig, and the forms of the log."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest

from recurra.config.server import ServerConfig
from recurra.errors import ConfigError
from recurra.server.logs import JsonFormatter, TextFormatter


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"port": 70_000}, "port"),
        ({"max_body_bytes": 10}, "max_body_bytes"),
        ({"max_prompts_per_call": 0}, "max_prompts_per_call"),
        ({"max_queue_len": 0}, "max_queue_len"),
        ({"default_chat_max_tokens": 0}, "default_chat_max_tokens"),
        ({"shutdown_timeout": -1}, "shutdown_timeout"),
        ({"engine_restart_limit": -1}, "engine_restart_limit"),
        ({"restart_backoff": 40.0}, "restart_backoff"),
        ({"api_keys": (" ",)}, "api_keys"),
        ({"ssl_certfile": Path("/nowhere"), "ssl_keyfile": Path("/nowhere")}, "ssl_certfile"),
        ({"ssl_certfile": Path(__file__)}, "ssl_keyfile"),
    ],
)
def test_what_cannot_work_is_named(settings: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig(**settings)
    assert refused.value.setting == name
    assert refused.value.hint


def test_unknown_and_mistyped_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'port'"):
        ServerConfig(prot=1)
    with pytest.raises(ConfigError, match="port='many'"):
        ServerConfig(port="many")  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        ServerConfig(api_keys=[{"sk-secret": 1}])  # type: ignore[list-item]
    assert "sk-secret" not in str(refused.value)


def test_keys_do_not_show() -> None:
    config = ServerConfig(api_keys="sk-secret")  # type: ignore[arg-type]
    assert config.api_keys[0].get_secret_value() == "sk-secret"
    assert "sk-secret" not in repr(config) + str(config.model_dump())


def record(message: str, fields: dict[str, Any] | None = None, error: bool = False) -> logging.LogRecord:
    info: Any = None
    if error:
        try:
            raise ValueError("why")
        except ValueError:
            info = sys.exc_info()
    made = logging.LogRecord("recurra.server", logging.WARNING, "file", 1, message, (), info)
    if fields is not None:
        made.fields = fields
    return made


def test_json_lines() -> None:
    line = JsonFormatter().format(
        record("a\nb", {"request_id": "1", "seconds": 0.5, "path": Path("/x")}, error=True)
    )
    assert "\n" not in line
    parsed = json.loads(line)
    assert (parsed["level"], parsed["message"], parsed["request_id"]) == ("warning", "a\nb", "1")
    assert (parsed["seconds"], parsed["path"]) == (0.5, "/x")
    assert parsed["time"].endswith("Z")
    assert "ValueError: why" in parsed["exception"]


def test_text_lines_cannot_be_forged() -> None:
    line = TextFormatter().format(record("a\nb", {"path": "/x y\n2026 INFO forged", "n": 3}))
    assert "\n" not in line
    assert line.endswith('WARNING a\\nb path="/x y\\n2026 INFO forged" n=3')
