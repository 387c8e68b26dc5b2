"""Responses that callers may go on from: their text and tokens. What the model remembered of them is the
engine's to keep; without it the past is computed again, and the answer is the same."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recurra.errors import ConfigError

_TABLE = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, expires REAL NOT NULL, content TEXT NOT NULL
)"""
DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A response and how it came about.

    Attributes:
        body: what the caller got.
        instructions: the system message that the prompt began with.
        messages: all turns, the answer included, without the instructions.
        prompt: the rendered conversation that was answered.
        token_ids: prompt and answer.
        answer: its text.
    """

    body: dict[str, Any]
    instructions: str | None
    messages: list[dict[str, Any]]
    prompt: str
    token_ids: list[int]
    answer: str


class ResponseStore:
    """Responses by id; each is visible to its owner only.

    Args:
        folder: where they outlive the server; None: in memory.
        days: how long they are kept.
        now: seconds since the epoch.

    Raises:
        ConfigError: the folder can't be used.
    """

    def __init__(
        self, folder: Path | None = None, days: float = 30.0, now: Callable[[], float] = time.time
    ) -> None:
        self._days, self._now = days, now
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            name = ":memory:" if folder is None else str(folder / "responses.sqlite")
            # One thread at a time: the event loop's, which may not be the one that made the store.
            self._db = sqlite3.connect(name, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                "responses_dir", str(folder), f"responses can't be kept there ({error}).",
                "Use a folder that this user may write.",
            ) from None  # fmt: skip

    def put(self, owner: str, stored: Stored) -> None:
        """Keep a response, and drop those whose time is over."""
        content = json.dumps([getattr(stored, name) for name in Stored.__slots__])
        expires = self._now() + self._days * DAY
        with self._db:
            self._db.execute("DELETE FROM responses WHERE expires <= ?", (self._now(),))
            self._db.execute(
                "REPLACE INTO responses VALUES (?, ?, ?, ?)", (stored.body["id"], owner, expires, content)
            )

    def get(self, owner: str, response_id: str) -> Stored | None:
        """A response, if there is one of this owner and its time isn't over."""
        row = self._db.execute(
            "SELECT content FROM responses WHERE id = ? AND owner = ? AND expires > ?",
            (response_id, owner, self._now()),
        ).fetchone()
        return None if row is None else Stored(*json.loads(row[0]))

    def delete(self, owner: str, response_id: str) -> bool:
        """Forget a response; False if there is none of this owner."""
        with self._db:
            found = self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner))
        return found.rowcount > 0

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()
