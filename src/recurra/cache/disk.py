"""Saved states in a folder: a file each, and an index that says which are there.

The files are the truth about states, the index about texts. Either may be missing after a crash: a file
without a line in the index is removed at the next start, a line without a file is struck out. No state is
used before its file checked out.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from recurra.cache.prefix import pack
from recurra.cache.state_file import SUFFIX, SavedState, read_state, write_state
from recurra.errors import ConfigError, StateError

log = logging.getLogger("recurra")

_TABLE = """
CREATE TABLE IF NOT EXISTS states (
    name TEXT PRIMARY KEY, space TEXT NOT NULL, tokens BLOB NOT NULL, nbytes INTEGER NOT NULL
)"""


@dataclass(frozen=True, slots=True)
class Line:
    """What the index says of a file.

    Attributes:
        name: of the file, without its ending.
        space: whose text it is.
        packed: the tokens that the state has seen.
        nbytes: of the file.
    """

    name: str
    space: str
    packed: bytes
    nbytes: int


class DiskStore:
    """States of one model in one folder. One process at a time; one thread of it calls the methods,
    but for :meth:`read`, which any may call.

    Args:
        folder: made if it isn't there; states go into a folder inside it that is named by the fingerprint.
        fingerprint: of the model and of its states' layout.
        row_bytes: of a slot.
        sync: wait for the disk at every write, which outlives a power cut. Without it, what was written is
            as safe as the system's memory: a killed process loses nothing.

    Raises:
        ConfigError: the folder can't be used, or another process uses it.
    """

    def __init__(self, folder: Path, fingerprint: str, row_bytes: int, sync: bool = False) -> None:
        self.folder = folder.expanduser() / fingerprint[:32]
        self.fingerprint, self.row_bytes, self.sync = fingerprint, row_bytes, sync
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened:
                self._lock = opened.enter_context((self.folder / "lock").open("w"))
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._index = self._open_index()
                opened.pop_all()
        except BlockingIOError:
            raise ConfigError(
                "prefix_cache_dir", str(folder), "another process keeps states of this model there.",
                "End it, or use another folder.",
            ) from None  # fmt: skip
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(
                "prefix_cache_dir", str(folder), f"states can't be kept there ({error}).",
                "Use a folder that this user may write.",
            ) from None  # fmt: skip

    def name_of(self, space: str, packed: bytes) -> str:
        """The file's name for a text."""
        return hashlib.blake2b(
            packed, key=hashlib.sha256(space.encode()).digest(), digest_size=20
        ).hexdigest()

    def lines(self) -> Iterator[Line]:
        """Everything that is there, after a look at the folder; leftovers of a crash are removed."""
        files = {path.stem: path for path in self.folder.glob(f"*{SUFFIX}")}
        for draft in self.folder.glob(".*.tmp"):
            draft.unlink(missing_ok=True)
        for name, space, packed, nbytes in self._index.execute("SELECT * FROM states").fetchall():
            path = files.pop(name, None)
            line = Line(name, space, packed, nbytes)
            if path is None or self.name_of(space, packed) != name or path.stat().st_size != nbytes:
                log.warning("a saved state is missing or of another size, and left aside: %s", name)
                self.remove(name)
            else:
                yield line
        for path in files.values():
            path.unlink(missing_ok=True)

    def write(self, space: str, state: SavedState) -> Line:
        """Keep a state: its file first, then its line.

        Raises:
            OSError: the disk is full, or worse.
        """
        packed = pack(state.tokens[: state.position])
        name = self.name_of(space, packed)
        nbytes = write_state(self._path(name), state, self.sync)
        with self._index:
            self._index.execute("REPLACE INTO states VALUES (?, ?, ?, ?)", (name, space, packed, nbytes))
        return Line(name, space, packed, nbytes)

    def read(self, name: str, packed: bytes) -> SavedState:
        """A state, checked; it must be the one of this text.

        Raises:
            StateError: it isn't, or it is damaged.
        """
        state = read_state(self._path(name), self.fingerprint, self.row_bytes)
        if pack(state.tokens[: state.position]) != packed:
            raise StateError(f"{self._path(name)}: it is the state of another text")
        return state

    def remove(self, name: str) -> None:
        """Strike a line out, then remove its file."""
        with self._index:
            self._index.execute("DELETE FROM states WHERE name = ?", (name,))
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the folder."""
        self._index.close()
        self._lock.close()

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}{SUFFIX}"

    def _open_index(self) -> sqlite3.Connection:
        path = self.folder / "index.sqlite"
        try:
            return self._connect(path)
        except sqlite3.DatabaseError:
            log.warning("the index of saved states is damaged; it is begun anew: %s", path)
            for file in self.folder.glob("index.sqlite*"):
                file.unlink()
            return self._connect(path)

    def _connect(self, path: Path) -> sqlite3.Connection:
        index = sqlite3.connect(path, check_same_thread=False)
        try:
            index.execute("PRAGMA journal_mode = WAL")
            index.execute("PRAGMA synchronous = NORMAL" if self.sync else "PRAGMA synchronous = OFF")
            index.execute(_TABLE)
            index.execute("SELECT count(*) FROM states").fetchone()
        except BaseException:
            index.close()
            raise
        return index
