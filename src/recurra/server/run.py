"""Runs the server in this process: sockets, signals, start and end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from recurra.config.server import ServerConfig
from recurra.engine.tokenizer import Tokenizer
from recurra.errors import ConfigError
from recurra.server.app import create_app
from recurra.server.logs import LogConfig, set_up_logging
from recurra.server.metrics import Metrics
from recurra.server.process import EngineProcess
from recurra.server.state import ServerState, shutting_down
from recurra.server.stored import ResponseStore
from recurra.server.supervisor import RestartPolicy, Supervisor
from recurra.server.worker import EngineFactory, build_engine

if TYPE_CHECKING:
    from recurra.config.engine import EngineConfig

log = logging.getLogger("recurra.server")

#: Seconds that replies which end with an error get to leave.
_FLUSH_SECONDS = 2.0


def run(server: ServerConfig, engine: EngineConfig, factory: EngineFactory = build_engine) -> int:
    """Serve until a signal; returns the exit code (see :func:`recurra.server.serve`)."""
    set_up_logging(LogConfig(server.log_format, server.log_level))
    with listening_socket(server) as sock:
        state = build_state(server, engine, factory)
        return _Runner(state, sock).run()


def build_state(server: ServerConfig, engine: EngineConfig, factory: EngineFactory) -> ServerState:
    """Everything that a server needs, with the engine not yet started.

    Raises:
        RecurraError: the tokenizer can't be read.
    """
    if engine.max_queue_len is None:
        engine = engine.model_copy(update={"max_queue_len": server.max_queue_len})
    metrics = Metrics()
    logs = LogConfig(server.log_format, server.log_level)
    policy = RestartPolicy(server.restart_backoff, server.restart_backoff_max, server.engine_restart_limit)
    supervisor = Supervisor(lambda: EngineProcess(factory, engine, logs), metrics, policy)
    names = server.served_model_name or (Path(engine.model).resolve().name,)
    responses = ResponseStore(_responses_folder(server, engine), server.responses_days)
    return ServerState(server, supervisor, metrics, load_tokenizer(engine), names, responses=responses)


def _responses_folder(server: ServerConfig, engine: EngineConfig) -> Path | None:
    """Where stored responses go: beside the states that they go on from, unless said otherwise."""
    if server.responses_dir is not None:
        return server.responses_dir.expanduser()
    states = getattr(engine, "prefix_cache_dir", None)
    return None if states is None else Path(states).expanduser()


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that the engine will have, too; None where there is none."""
    if config.skip_tokenizer_init:
        return None
    return Tokenizer.from_folder(config.tokenizer or config.model, config.chat_template, config.model)


@contextlib.contextmanager
def listening_socket(config: ServerConfig) -> Iterator[socket.socket]:
    """A bound socket, so that a taken port is known before the model loads.

    Raises:
        ConfigError: it can't be bound.
    """
    if config.uds is not None:
        with _unix_socket(config.uds) as sock:
            yield sock
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            "host", config.host, f"{error.strerror}.", 'Use "127.0.0.1" or "0.0.0.0".'
        ) from error
    with socket.socket(family, kind) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(2048)
        except OSError as error:
            hint = "Choose another port, or 0 for a free one."
            raise ConfigError("port", config.port, f"{error.strerror}.", hint) from error
        scheme = "http" if config.ssl_certfile is None else "https"
        host = f"[{config.host}]" if ":" in config.host else config.host
        log.info("listening on %s://%s:%d", scheme, host, sock.getsockname()[1])
        yield sock


@contextlib.contextmanager
def _unix_socket(path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        if path.is_socket():
            if sock.connect_ex(str(path)) == 0:
                raise ConfigError("uds", str(path), "another server listens there.", "Choose another path.")
            path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.bind(str(path))
            sock.listen(2048)
        except OSError as error:
            raise ConfigError("uds", str(path), f"{error.strerror}.", "Choose a writable path.") from error
        log.info("listening on unix:%s", path)
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


class _Server(uvicorn.Server):  # type: ignore[misc]
    """Uvicorn without its signal handlers: ours let requests finish first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Runner:
    """One run of the server, from the first byte to the exit code."""

    def __init__(self, state: ServerState, sock: socket.socket) -> None:
        self._state = state
        self._sock = sock
        config = state.config
        settings: dict[str, Any] = {
            "log_config": None,
            "access_log": False,
            "server_header": False,
            "timeout_graceful_shutdown": 5,
            "ssl_certfile": config.ssl_certfile,
            "ssl_keyfile": config.ssl_keyfile,
        }
        self._config = uvicorn.Config(create_app(state), **settings)
        self._signals = 0
        self._exit_code: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self) -> int:
        """Serve until the end.

        Raises:
            RecurraError: the engine can't be kept running.
        """
        try:
            self._config.load()
        except (ssl.SSLError, OSError) as error:
            hint = "Give a PEM certificate and its key."
            raise ConfigError("ssl_certfile", str(self._config.ssl_certfile), f"{error}.", hint) from error
        self._server = _Server(self._config)
        self._state.supervisor.gave_up = self._give_up
        with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
            runner.run(self._serve())
        if self._exit_code is None and self._state.supervisor.failure is not None:
            raise self._state.supervisor.failure
        return self._exit_code or 0

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._server.serve(sockets=[self._sock])
        if self._server.force_exit:  # uvicorn skips the end of the lifespan then
            await self._state.supervisor.stop(0)
            await self._server.lifespan.shutdown()

    def _give_up(self) -> None:
        """The engine can't be kept running: end, and say why."""
        self._server.should_exit = True

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals == 1:
            log.info("stopping", extra={"fields": {"signal": number, "in_flight": self._state.in_flight}})
            task = asyncio.get_running_loop().create_task(self._drain())
            self._tasks.add(task)
        else:
            log.warning("stopping at once")
            self._exit_code = 128 + number
            self._server.force_exit = self._server.should_exit = True

    async def _drain(self) -> None:
        """Let what is in flight finish, tell the rest, then end."""
        self._state.draining = True
        if not await self._idle_within(self._state.config.shutdown_timeout):
            log.warning("aborting requests", extra={"fields": {"in_flight": self._state.in_flight}})
            self._state.supervisor.abort_calls(shutting_down())
            await self._idle_within(_FLUSH_SECONDS)
        self._server.should_exit = True

    async def _idle_within(self, seconds: float) -> bool:
        deadline = asyncio.get_running_loop().time() + seconds
        while self._state.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        return not self._state.in_flight
