"""Every exception that Recurra raises on purpose.

Each message names the offending setting or field, its value, and what would work instead.
"""

from __future__ import annotations

from typing import Any


class RecurraError(Exception):
    """Root of the tree: catch this to catch everything Recurra raises on purpose."""


class ConfigError(RecurraError, ValueError):
    """A setting that can't work, refused before weights load.

    Args:
        setting: the setting's public name, e.g. ``max_num_seqs``.
        value: what was given.
        problem: why it can't work.
        hint: a value, or a step, that would.
    """

    def __init__(self, setting: str, value: Any, problem: str, hint: str = "") -> None:
        self.setting = setting
        self.value = value
        self.problem = problem
        self.hint = hint
        super().__init__(f"{setting}={value!r}: {problem}" + (f" {hint}" if hint else ""))


class CheckpointError(RecurraError):
    """A checkpoint folder or file that can't be read, or that doesn't fit its configuration."""


class UnknownArchitectureError(CheckpointError):
    """An architecture that no model file serves."""

    def __init__(self, name: str, known: list[str]) -> None:
        self.name = name
        self.known = known
        super().__init__(f"unknown architecture {name!r}; known: {', '.join(sorted(known))}")


#: What the ``serve`` extra brings, under the names that are imported.
SERVE_MODULES = frozenset(
    {"fastapi", "starlette", "uvicorn", "uvloop", "httptools", "zmq", "msgspec", "prometheus_client"}
)


class MissingDependencyError(RecurraError, ImportError):
    """A package is needed for what was asked, and isn't installed.

    Args:
        package: its name.
        purpose: what needs it.
        extra: the extra that brings it; None: Recurra always needs it.
    """

    def __init__(self, package: str, purpose: str, extra: str | None) -> None:
        way = (
            f"pip install 'recurra[{extra}]'"
            if extra is not None
            else "every installation of Recurra has it, so this one is incomplete; pip install recurra mends it"
        )
        super().__init__(f"{purpose} needs the package {package!r}: {way}")


def missing_dependency(
    error: ModuleNotFoundError, purpose: str
) -> ModuleNotFoundError | MissingDependencyError:
    """The failed import of somebody else's package as an error that says how to get it; a failed import of
    one of our own modules is a bug and stays what it is."""
    package = str(error.name).partition(".")[0]
    if package in ("None", "recurra"):
        return error
    return MissingDependencyError(package, purpose, "serve" if package in SERVE_MODULES else None)


class RequestError(RecurraError, ValueError):
    """A request that can't be served as asked; nothing was queued.

    Args:
        message: what is wrong, with the value.
        param: the request field at fault.
        status: the HTTP status that says so.
        code: short machine-readable reason (OpenAI's ``error.code``).
    """

    def __init__(
        self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None
    ) -> None:
        self.param = param
        self.status = status
        self.code = code
        super().__init__(message)


class QueueFullError(RequestError):
    """More requests wait than the queue limit allows; try again after ``retry_after`` seconds."""

    def __init__(self, limit: int, retry_after: int = 1) -> None:
        self.retry_after = retry_after
        super().__init__(
            f"the queue is full ({limit} requests waiting); try again in {retry_after} s",
            status=429,
            code="queue_full",
        )


class EngineDeadError(RecurraError, RuntimeError):
    """The engine process ended; requests in flight are lost and were told so."""


class StateError(RecurraError, ValueError):
    """A saved state that can't be used: damaged, or of another model."""


class RefusedArgumentError(RecurraError, ValueError):
    """An argument of an operator that can't be served as it was given.

    Args:
        function: the operator's name.
        argument: the argument's.
        problem: why it can't be served.
        hint: what would work.
    """

    def __init__(self, function: str, argument: str, problem: str, hint: str = "") -> None:
        self.function = function
        self.argument = argument
        super().__init__(f"{function}: {argument}: {problem}" + (f" {hint}" if hint else ""))
