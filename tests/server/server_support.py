"""The server in this process, with the fake engine in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from fake_engine import FakeConfig, build_fake, byte_tokenizer
from fastapi.testclient import TestClient

from recurra.config.server import ServerConfig
from recurra.server.app import create_app
from recurra.server.messages import Command, Event, Stop
from recurra.server.metrics import Metrics
from recurra.server.process import EngineSocket
from recurra.server.state import ServerState
from recurra.server.supervisor import RestartPolicy, Supervisor
from recurra.server.worker import ZmqChannel, serve_engine


class EngineThread:
    """What EngineProcess is, in a thread."""

    def __init__(self, config: FakeConfig, factory: Any = build_fake) -> None:
        self._socket = EngineSocket()
        self._code = -1
        self._config = config
        self._factory = factory
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        channel = ZmqChannel(self._socket.address)
        self._code = serve_engine(self._factory, self._config, channel)
        channel.close()

    def send(self, command: Command) -> None:
        self._socket.send(command)

    async def receive(self) -> Event:
        return await self._socket.receive()

    async def wait(self) -> int:
        while self._thread.is_alive():
            await asyncio.sleep(0.005)
        return self._code

    async def stop(self, grace: float) -> None:
        if self._thread.is_alive():
            self.send(Stop())
            await self.wait()
        self._socket.close()


def make_state(
    engine: FakeConfig | None = None,
    launch: Callable[[], Any] | None = None,
    tokenizer: Any = ...,
    **settings: Any,
) -> ServerState:
    """A server's state on the fake engine."""
    engine = engine or FakeConfig()
    metrics = Metrics()
    supervisor = Supervisor(launch or (lambda: EngineThread(engine)), metrics, RestartPolicy(0.02, 0.1, 3))
    config = ServerConfig(**settings)
    names = config.served_model_name or ("fake",)
    return ServerState(
        config, supervisor, metrics, byte_tokenizer() if tokenizer is ... else tokenizer, names
    )


@contextlib.contextmanager
def serving(state: ServerState, ready: bool = True) -> Iterator[TestClient]:
    """A client of a running server."""
    with TestClient(create_app(state), raise_server_exceptions=False) as client:
        if ready:
            wait_until(lambda: client.get("/health").status_code == 200)
        yield client


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for something that must come true soon."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)


def events(text: str) -> list[Any]:
    """The events of a stream; the end mark as the string "[DONE]"."""
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks), blocks
    return [block[6:] if block[6:] == "[DONE]" else json.loads(block[6:]) for block in blocks]


def metric(client: Any, name: str) -> float:
    """A sample from /metrics."""
    for line in client.get("/metrics").text.splitlines():
        if line.startswith(name + " "):
            return float(line.rsplit(" ", 1)[1])
    raise KeyError(name)
