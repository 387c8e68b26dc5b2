"""The server as a program of its own, and what a test asks of its process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
from server_support import wait_until


class Program:
    """A server that runs; its log is read as it comes."""

    def __init__(self, arguments: list[str]) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = ""

    def _read(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(iter(self.process.stderr.readline, ""))

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def wait_listening(self) -> None:
        """Until it accepts connections."""
        wait_until(lambda: "listening on" in self.log or self.process.poll() is not None, 60)
        found = re.search(r"http://[\d.]+:\d+", self.log)
        assert found is not None, self.log
        self.url = found[0]

    def wait_ready(self) -> None:
        """Until it is warm."""
        self.wait_listening()
        wait_until(lambda: self.get("/health").status_code == 200, 60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=20)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=20)

    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = [child for child in children if "--multiprocessing-fork" in child.cmdline()]
        return engine

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 20) -> int:
        """Wait for its end; returns the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


@contextlib.contextmanager
def program(arguments: list[str]) -> Iterator[Program]:
    """A running server, gone afterwards whatever happens."""
    running = Program(arguments)
    try:
        yield running
    finally:
        if running.process.poll() is None:
            running.signal(signal.SIGKILL)
        running.end()
        assert running.process.stderr is not None
        running.process.stderr.close()
