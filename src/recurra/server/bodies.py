"""Explains a body that doesn't fit its schema."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError

from recurra.errors import RequestError
from recurra.server.protocol.completions import PROMPT_FORMS

#: Fields with several forms: the library would complain about the first form only.
_FORMS = {
    "prompt": "must be " + PROMPT_FORMS,
    "stop": "must be a string or a list of strings",
    "content": "must be a string or a list of text parts",
}


def explain(error: RequestValidationError) -> RequestError:
    """The first complaint as a 400 that names the field."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return RequestError(
            f"the body is no valid JSON: {reason} at character {first['loc'][-1]}", code="invalid_json"
        )
    if isinstance(error.body, bytes):
        return RequestError("send JSON with the header 'Content-Type: application/json'", code="not_json")
    if error.body is None:
        return RequestError("the body is missing; send a JSON object", code="invalid_json")
    path = _path(first["loc"][1:], error.body, first["type"] == "missing")
    message = _message(first, path)
    if not path:
        return RequestError(f"the body: {message}", code="invalid_type")
    return RequestError(f"{_dotted(path)}: {message}", param=str(path[0]), code="invalid_type")


def _message(first: Mapping[str, Any], path: Sequence[str | int]) -> str:
    if first["type"] == "missing":
        return "this field is required"
    message = str(first["msg"])
    if path and path[-1] in _FORMS and first["type"] in ("string_type", "list_type"):
        return _FORMS[str(path[-1])]
    return message.replace("Input should be", "must be")


def _path(loc: Sequence[str | int], body: Any, missing: bool) -> list[str | int]:
    """The part of a location that exists in the body; the rest names alternatives of the schema."""
    path: list[str | int] = []
    for step in loc:
        if missing and isinstance(body, Mapping) and step == loc[-1] and step not in body:
            return [*path, step]
        if not _has(body, step):
            break
        body = body[step]
        path.append(step)
    return path


def _has(body: Any, step: str | int) -> bool:
    if isinstance(body, Mapping):
        return step in body
    return isinstance(body, list) and isinstance(step, int) and step < len(body)


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else str(step)
    return text[:200]
