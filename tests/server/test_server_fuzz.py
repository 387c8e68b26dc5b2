"""Whatever JSON comes, the reply is a good one or a refusal, never a 500, and the engine lives on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recurra.server.protocol.chat import ChatRequest
from recurra.server.protocol.completions import CompletionRequest
from recurra.server.protocol.known import HARMLESS, REFUSED
from recurra.server.protocol.tokens import DetokenizeRequest, TokenizeRequest

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.integers(-(2**70), 2**70)
    | st.floats(width=32)
    | st.sampled_from(["", "a", "漢字", "text", "user", "\ud800", "{{ x }}", "fake"])
    | st.text(st.characters(codec=None), max_size=5)
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "1", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool"]), "content": anything}
)


def bodies(model: Any, **likely: Any) -> Any:
    """Bodies with a likely prompt, a few of the known fields, and now and then something else."""
    names = sorted({*model.model_fields, *HARMLESS, *REFUSED, "nonsense", "max_tokens"} - set(likely))
    extra = st.dictionaries(st.sampled_from(names), anything, max_size=4)
    return st.builds(lambda a, b: a | b, extra, st.fixed_dictionaries({}, optional=likely))


prompt = st.sampled_from(["abc", ["a", "bc"], [1, 2], [[1], [2, 3]]]) | anything
ROUTES = {
    "/v1/completions": bodies(
        CompletionRequest,
        prompt=prompt,
        max_tokens=st.integers(-1, 5),
        stream=st.booleans(),
        n=st.integers(0, 3),
    ),
    "/v1/chat/completions": bodies(
        ChatRequest,
        messages=st.lists(message, max_size=3),
        max_tokens=st.integers(0, 5),
        stream=st.booleans(),
    ),
    "/tokenize": bodies(TokenizeRequest, prompt=anything),
    "/detokenize": bodies(DetokenizeRequest, tokens=st.lists(st.integers(-1, 300), max_size=4) | anything),
}


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_body_makes_a_500(client: TestClient, path: str, data: st.DataObject) -> None:
    body = data.draw(ROUTES[path])
    reply = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["message"]
        assert len(error["message"]) < 2000
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("data: [DONE]\n\n"), reply.text


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=st.binary(max_size=40))
def test_no_bytes_make_a_500(client: TestClient, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert client.post("/v1/completions", content=content, headers=headers).status_code == 400
