"""One log line an event, as text or JSON; fields come from ``extra={"fields": {...}}``.

What goes into a line is chosen where it is logged: never a prompt, an answer or a key.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, NamedTuple


class LogConfig(NamedTuple):
    """Form ("text" or "json") and level ("debug" ... "error") of the log."""

    format: str = "text"
    level: str = "info"


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = getattr(record, "fields", None)
    return fields if isinstance(fields, dict) else {}


def _time(record: logging.LogRecord) -> str:
    return (
        datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    )


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """Time, level, message, then the fields as key=value."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {key}={_plain(value)}" for key, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname:<7} {_plain_message(record)}{fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain_message(record: logging.LogRecord) -> str:
    return record.getMessage().replace("\n", "\\n")


def _plain(value: Any) -> str:
    text = str(value)
    return json.dumps(text) if any(c.isspace() or c in '"=' for c in text) or not text else text


def set_up_logging(config: LogConfig) -> None:
    """Send the log of this process to standard error in the given form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("recurra").setLevel(config.level.upper())
    for name in ("uvicorn", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(logging.WARNING)
