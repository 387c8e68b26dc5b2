"""Starts, watches and ends the engine process, and owns the socket to it."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
import tempfile
from pathlib import Path
from typing import Any, Protocol

import zmq
import zmq.asyncio

from recurra.server.logs import LogConfig
from recurra.server.messages import Command, Event, Stop, decode_event, encode
from recurra.server.worker import EngineFactory, worker_main


class EngineHandle(Protocol):
    """A running engine, seen from the server; a new one for every start."""

    def send(self, command: Command) -> None:
        """Send without waiting."""
        ...

    async def receive(self) -> Event:
        """The next event."""
        ...

    async def wait(self) -> int:
        """Wait for the engine's end; returns its exit code."""
        ...

    async def stop(self, grace: float) -> None:
        """Ask it to end, kill it after ``grace`` seconds, and free what it held."""
        ...


class Launcher(Protocol):
    """Starts engines."""

    def __call__(self) -> EngineHandle:
        """Start one."""
        ...


class EngineSocket:
    """The server's end of a Unix socket in a directory that only this user may enter."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="recurra-"))
        self.address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(self.address)

    def send(self, command: Command) -> None:
        """Send without waiting; without a limit nothing ever has to."""
        self._socket.send(encode(command))

    async def receive(self) -> Event:
        """The next event."""
        return decode_event(await self._socket.recv())

    def close(self) -> None:
        """Drop what is not sent and remove the directory; may be called again."""
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineProcess:
    """An engine in a process of its own, started afresh (no fork: threads and CUDA don't survive it)."""

    def __init__(self, factory: EngineFactory, config: Any, logs: LogConfig) -> None:
        self._socket = EngineSocket()
        context = multiprocessing.get_context("spawn")
        args = (factory, config, self._socket.address, logs)
        self._process = context.Process(target=worker_main, args=args, name="recurra-engine", daemon=True)
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send without waiting."""
        self._socket.send(command)

    async def receive(self) -> Event:
        """The next event."""
        return await self._socket.receive()

    async def wait(self) -> int:
        """Wait for the process's end; returns its exit code, negative for a signal."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(self._process.sentinel, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._process.sentinel)
        self._process.join()
        code = self._process.exitcode
        assert code is not None
        return code

    async def stop(self, grace: float) -> None:
        """Ask it to end, kill it after ``grace`` seconds, and free what it held."""
        if self._process.is_alive() and grace > 0:
            self.send(Stop())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.wait(), grace)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._socket.close()
