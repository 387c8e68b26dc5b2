"""The engine process: build the engine, warm it up, then serve the loop until told to stop."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import zmq

from recurra.errors import ConfigError, RecurraError
from recurra.server.logs import LogConfig, set_up_logging
from recurra.server.loop import EngineLoop
from recurra.server.messages import (
    Command,
    EngineInfo,
    Event,
    Progress,
    StartupFailed,
    decode_command,
    encode,
)

if TYPE_CHECKING:
    from recurra.config.engine import EngineConfig

log = logging.getLogger("recurra.server.engine")

#: Exit codes of the engine process.
EXIT_STOPPED, EXIT_CRASHED, EXIT_CONFIGURATION = 0, 1, 2

ProgressCallback = Callable[[str, int, int], None]
#: Builds an engine from its settings; a function at the top level of a module, so that it crosses to
#: the new process by name.
EngineFactory = Callable[[Any, ProgressCallback], Any]

_PR_SET_PDEATHSIG = 1


class ZmqChannel:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)

    def receive(self, block: bool) -> Iterable[Command]:
        """Commands that have arrived; waits for the first one if ``block``."""
        if block:
            yield decode_command(self._socket.recv())
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield decode_command(data)

    def send(self, event: Event) -> None:
        """Send without waiting: the queue has no limit, its content is bounded by the requests."""
        self._socket.send(encode(event))

    def close(self) -> None:
        """Give what was sent a second to arrive."""
        self._socket.close()
        self._context.term()


def build_engine(config: EngineConfig, progress: ProgressCallback) -> Any:
    """The real engine, warm."""
    from recurra.engine.engine import LLMEngine

    engine = LLMEngine(config, progress)
    engine.warm_up(progress)
    return engine


def worker_main(factory: EngineFactory, config: Any, address: str, logs: LogConfig) -> None:
    """Entry of the engine process; ends by ``sys.exit`` with one of the exit codes."""
    _ignore_signals()
    _die_with_parent()
    set_up_logging(logs)
    channel = ZmqChannel(address)
    try:
        code = serve_engine(factory, config, channel)
    finally:
        channel.close()
    sys.exit(code)


def serve_engine(factory: EngineFactory, config: Any, channel: Any) -> int:
    """Build an engine and run its loop; returns the exit code."""
    try:
        engine = factory(config, lambda *p: channel.send(Progress(*p)))
        channel.send(engine_info(engine))
    except RecurraError as error:
        channel.send(_settled(error))
        return EXIT_CONFIGURATION
    except Exception as error:
        log.exception("the engine could not start")
        channel.send(StartupFailed(f"{type(error).__name__}: {error}", settled=False))
        return EXIT_CRASHED
    try:
        EngineLoop(engine, channel, numbers).run()
    except Exception:
        log.exception("the engine failed in a step and ends; requests in flight are lost")
        return EXIT_CRASHED
    return EXIT_STOPPED


def _settled(error: RecurraError) -> StartupFailed:
    """The error in a form from which the server can raise it again."""
    setting = None
    if isinstance(error, ConfigError):
        plain = error.value is None or isinstance(error.value, str | int | float)
        setting = (error.setting, error.value if plain else str(error.value), error.problem, error.hint)
    return StartupFailed(str(error), True, setting)


def engine_info(engine: Any) -> EngineInfo:
    """What the server is told of a warm engine."""
    return EngineInfo(
        vocab_size=int(engine.model_config.vocab_size),
        max_model_len=int(engine.max_model_len),
        max_queue_len=engine.config.max_queue_len,
        architecture=str(engine.model_config.architecture),
        sampling_defaults=dict(engine.sampling_defaults),
    )


def numbers(stats: Any) -> dict[str, float]:
    """The numeric fields of the engine's statistics."""
    return {
        name: float(value)
        for name, value in dataclasses.asdict(stats).items()
        if isinstance(value, int | float)
    }


def _ignore_signals() -> None:
    """Ctrl-C reaches the whole terminal group, and a service manager's SIGTERM the whole service.

    The server decides when the engine ends, so that requests in flight can finish first.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _die_with_parent() -> None:
    """End this process, whatever it does, when the server's process is gone."""
    if sys.platform == "linux":
        # The kernel's own watch: works even while a native call holds the interpreter.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    assert parent is not None, "the engine process is started through multiprocessing"
    threading.Thread(target=_watch, args=(parent,), name="parent-watch", daemon=True).start()


def _watch(parent: Any) -> None:
    parent.join()
    os._exit(EXIT_CRASHED)
