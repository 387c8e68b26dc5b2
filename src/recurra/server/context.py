"""What is known of one HTTP request beyond ASGI's scope: its id, and fields for its log line."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope

_KEY = "recurra.context"
_GOOD_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class RequestContext:
    """One request's id and log fields."""

    request_id: str
    fields: dict[str, Any] = field(default_factory=dict)


def new_context(scope: Scope) -> RequestContext:
    """Start a request: the caller's X-Request-Id if it is printable, else a new one."""
    given = next((value.decode("latin-1") for key, value in scope["headers"] if key == b"x-request-id"), "")
    request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
    context = scope[_KEY] = RequestContext(request_id)
    return context


def context_of(scope: Scope) -> RequestContext:
    """The context that the outermost middleware made."""
    context: RequestContext = scope[_KEY]
    return context
