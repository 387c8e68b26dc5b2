"""OpenAI's batch files: a JSON object a line, read lazily and written so that a killed run loses nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from recurra.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Task:
    """One line of the input.

    Attributes:
        line: its number, from 1.
        custom_id: the caller's name for it.
        url: the route that it is meant for.
        body: the request.
    """

    line: int
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, and why."""

    line: int
    custom_id: str | None
    problem: str


def parse_line(number: int, text: str) -> Task | BadLine:
    """Read one line of the input."""
    try:
        record = json.loads(text)
    except ValueError as error:
        return BadLine(number, None, f"not JSON: {error}")
    if not isinstance(record, dict):
        return BadLine(number, None, f"a {type(record).__name__}, not a JSON object")
    custom_id = record.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BadLine(number, None, "custom_id is missing, or no text")
    if str(record.get("method", "POST")).upper() != "POST":
        return BadLine(number, custom_id, f"method {record['method']!r}; only POST is known")
    url, body = record.get("url"), record.get("body")
    if not isinstance(url, str):
        return BadLine(number, custom_id, "url is missing; use /v1/completions or /v1/chat/completions")
    if not isinstance(body, dict):
        return BadLine(number, custom_id, "body is missing, or no JSON object")
    return Task(number, custom_id, url, body)


@dataclass(slots=True)
class Done:
    """What an output file holds already."""

    custom_ids: set[str] = field(default_factory=set)
    lines: set[int] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.custom_ids) + len(self.lines)

    def add(self, record: dict[str, Any]) -> None:
        """Note a record: by its custom_id or, for a line that had none, by its line number."""
        custom_id = record.get("custom_id")
        if isinstance(custom_id, str):
            self.custom_ids.add(custom_id)
        elif isinstance(record.get("line"), int):
            self.lines.add(record["line"])


def count_lines(path: Path) -> int:
    """Lines with content.

    Raises:
        ConfigError: the file can't be read.
    """
    try:
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    except OSError as error:
        raise ConfigError("input", str(path), f"can't be read ({error.strerror}).", "Give a JSON Lines file.") from error  # fmt: skip


def read_tasks(path: Path, done: Done) -> Iterator[Task | BadLine]:
    """The requests that are not answered yet, in order; a custom_id that comes twice is a bad line."""
    seen: set[str] = set()
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, text in enumerate(lines, 1):
            if not text.strip() or number in done.lines:
                continue
            task = parse_line(number, text)
            if task.custom_id is not None and task.custom_id in seen:
                yield BadLine(number, None, f"custom_id {task.custom_id!r} came before")
                continue
            if task.custom_id is not None:
                seen.add(task.custom_id)
            if task.custom_id not in done.custom_ids:
                yield task


class OutputFile:
    """Appends records; each is one write of a whole line, so a killed run leaves at most one torn line.

    Args:
        path: the file; what it holds already is kept, but for a torn last line.
        overwrite: begin anew.

    Raises:
        ConfigError: it can't be opened, or holds something else than records.
    """

    def __init__(self, path: Path, overwrite: bool) -> None:
        self.done = Done()
        self._path = path
        try:
            keep = 0 if overwrite else self._read_done()
            self._file: IO[bytes] = path.open("ab", buffering=0)
            # Old content goes when the first new result comes: a run that can't start destroys nothing.
            self._cut: int | None = keep
        except OSError as error:
            raise ConfigError("output", str(path), f"can't be written ({error.strerror}).", "Give another path.") from error  # fmt: skip

    def _read_done(self) -> int:
        """Note every record; returns the bytes up to the end of the last whole line."""
        if not self._path.exists():
            return 0
        whole = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    break
                try:
                    self.done.add(json.loads(line))
                except (ValueError, AttributeError):
                    raise ConfigError(
                        "output", str(self._path), f"line {number} is no batch result.",
                        "Choose another file, or --overwrite.",
                    ) from None  # fmt: skip
                whole += len(line)
        return whole

    def write(self, record: dict[str, Any]) -> None:
        """Append a record."""
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        if self._cut is not None:
            self._file.truncate(self._cut)
            self._cut = None
        self._file.write(data)
        self.done.add(record)

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def bad_line_record(bad: BadLine) -> dict[str, Any]:
    """The output for a line that is no request."""
    return {
        "id": f"batch_line_{bad.line}",
        "custom_id": bad.custom_id,
        "line": bad.line,
        "response": None,
        "error": {"code": "invalid_line", "message": f"line {bad.line}: {bad.problem}"},
    }


def response_record(task: Task, status: int, body: Any) -> dict[str, Any]:
    """The output for a request, answered or refused."""
    name = f"batch_line_{task.line}"
    return {
        "id": name,
        "custom_id": task.custom_id,
        "response": {"status_code": status, "request_id": name, "body": body},
        "error": None,
    }
