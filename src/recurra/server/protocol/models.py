"""``GET /v1/models``."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict


class ModelCard(TypedDict):
    """One served name; ``max_model_len`` is null while the model loads."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(TypedDict):
    """All served names."""

    object: Literal["list"]
    data: list[ModelCard]
