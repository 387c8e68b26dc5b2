"""Everything that can go wrong in a call, as OpenAI's error object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi.responses import JSONResponse

from recurra.errors import EngineDeadError, RequestError

#: OpenAI's ``error.type`` by HTTP status; others below 500 are invalid requests.
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


_MAX_MESSAGE = 1000


class RefusalError(RequestError):
    """A request that can't be served now; ``retry_after`` seconds later it might be."""

    def __init__(
        self,
        message: str,
        status: int,
        code: str | None,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.retry_after = retry_after
        super().__init__(message, param=param, status=status, code=code)


class AnswerError(RequestError):
    """An answer failed while it was made; the call it belongs to ends with this."""

    def __init__(self, message: str) -> None:
        super().__init__(message, status=500, code="generation_failed")


@dataclass(frozen=True, slots=True)
class Problem:
    """One error reply."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """Label of the metric."""
        return self.code or str(self.status)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The HTTP reply."""
        return JSONResponse(self.body(), self.status, dict(self.headers))


def _short(message: str) -> str:
    """A message that quotes a value may quote a whole body."""
    return message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."


def problem_of(error: Exception) -> Problem:
    """The reply for an exception of a call; for one nobody foresaw it tells no internals."""
    if isinstance(error, EngineDeadError):
        message = "the engine process ended and this request with it; it is being restarted, try again"
        return Problem(503, message, None, "engine_dead", {"Retry-After": "5"})
    if isinstance(error, RequestError):
        retry_after = getattr(error, "retry_after", None)
        headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        return Problem(error.status, _short(str(error)), error.param, error.code, headers)
    return Problem(500, f"internal error: {type(error).__name__}", None, "internal_error")
