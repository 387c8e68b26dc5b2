"""One server on the fake engine for all tests that leave no trace in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from server_support import make_state, serving


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    """A running server without keys, on a fast fake engine."""
    with serving(make_state()) as client:
        yield client
