"""What all request bodies share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from recurra.errors import RequestError
from recurra.server.protocol.known import check_extra

#: Integers that fit the wire to the engine.
Int = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]


class Body(BaseModel):
    """A request body: JSON types as they are (no "1" for 1), null for a field's default."""

    model_config = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, frozen=True, protected_namespaces=()
    )

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _characters(cls, value: Any) -> Any:
        _check_characters(value)
        return value

    def check_extra(self, ignore_unknown: bool) -> None:
        """Refuse what can't be honoured and, unless told otherwise, what nobody knows.

        Raises:
            RequestError: 400, naming the field.
        """
        check_extra(self.model_extra or {}, set(type(self).model_fields), ignore_unknown)


class StreamOptions(BaseModel):
    """What a stream tells besides the answer."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # nothing here needs padding against traffic analysis


class Streamed(Body):
    """A body that may ask for a stream."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def check_stream(self) -> None:
        """Refuse ``stream_options`` without ``stream``, as OpenAI does."""
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true", param="stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


def _check_characters(value: Any) -> None:
    """Refuse lone surrogates: JSON can spell them, but they are no text, and no reply could quote them."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise PydanticCustomError("unicode", "holds a lone surrogate, which is no character") from None
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _check_characters(key)
            _check_characters(item)
    elif isinstance(value, list) and value and type(value[0]) is not int:  # token ids have no text
        for item in value:
            _check_characters(item)


def named(value: Any) -> dict[str, Any]:
    """Only the fields that are not null."""
    return {key: item for key, item in value.items() if item is not None}
