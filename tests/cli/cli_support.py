"""What the tests of the command share."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


def records(path: Path) -> list[dict[str, Any]]:
    """A JSON Lines file's objects."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
