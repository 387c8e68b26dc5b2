"""Server-sent events: the same answers in pieces."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from server_support import events


def stream(client: TestClient, path: str = "/v1/completions", **body: Any) -> list[Any]:
    reply = client.post(path, json={"stream": True} | body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text)


def texts(found: list[Any], field: str = "text") -> dict[int, str]:
    """What each answer's pieces say together."""
    joined: dict[int, str] = {}
    for event in found:
        for choice in [] if event == "[DONE]" else event["choices"]:
            piece = choice[field] if field == "text" else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


CASES: list[dict[str, Any]] = [
    {"prompt": "abc", "max_tokens": 7},
    {"prompt": ["héllo 漢字", "x"], "n": 2, "max_tokens": 23},
    {"prompt": "abcdef", "stop": ["ef", "da"], "max_tokens": 40},
    {"prompt": "ab", "echo": True, "max_tokens": 3},
    {"prompt": ["ab", "cd"], "echo": True, "max_tokens": 2, "n": 2},
    {"prompt": "abc", "max_tokens": 0},
    {"prompt": "abc", "max_tokens": 0, "echo": True},
    {"prompt": "漢", "max_tokens": 2},
]


@pytest.mark.parametrize("body", CASES)
def test_pieces_make_the_whole(client: TestClient, body: dict[str, Any]) -> None:
    whole = client.post("/v1/completions", json=body).json()
    found = stream(client, **body, stream_options={"include_usage": True})
    assert texts(found) == {c["index"]: c["text"] for c in whole["choices"]}
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"] == whole["usage"]
    ends = {c["index"]: c["finish_reason"] for e in found[:-2] for c in e["choices"] if c["finish_reason"]}
    assert ends == {c["index"]: c["finish_reason"] for c in whole["choices"]}


def test_characters_come_whole(client: TestClient) -> None:
    found = stream(client, prompt="é漢🙂", max_tokens=18)
    pieces = [c["text"] for e in found[:-1] for c in e["choices"]]
    assert "".join(pieces) == "é漢🙂" * 2
    assert "�" not in "".join(pieces)
    assert len(pieces) <= 6


def test_every_event_has_usage_null_until_the_last(client: TestClient) -> None:
    found = stream(client, prompt="ab", max_tokens=3, stream_options={"include_usage": True})
    assert [event["usage"] is None for event in found[:-1]] == [True, True, True, False]
    assert "usage" not in stream(client, prompt="ab", max_tokens=3)[0]


def test_continuous_usage(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = stream(client, prompt="ab", max_tokens=3, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in found[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 3


def test_one_id_and_time_for_all_events(client: TestClient) -> None:
    found = stream(client, prompt="ab", max_tokens=3)[:-1]
    assert len({(event["id"], event["created"], event["model"]) for event in found}) == 1


def test_logprobs_in_pieces_make_the_whole(client: TestClient) -> None:
    body = {"prompt": "a漢", "max_tokens": 6, "logprobs": 2, "echo": True}
    whole = client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    found = stream(client, **body)[:-1]
    for name, values in whole.items():
        assert [v for e in found for c in e["choices"] for v in c["logprobs"][name]] == values


def test_chat_begins_with_the_role(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi 漢"}], "max_tokens": 15, "n": 2}
    found = stream(client, "/v1/chat/completions", **body)
    assert found[-1] == "[DONE]"
    assert [e["choices"][0]["delta"] for e in found[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert all("role" not in e["choices"][0]["delta"] for e in found[2:-1])
    assert {e["object"] for e in found[:-1]} == {"chat.completion.chunk"}
    whole = client.post("/v1/chat/completions", json=body).json()
    assert texts(found, "content") == {c["index"]: c["message"]["content"] for c in whole["choices"]}


def test_chat_logprobs_in_pieces(client: TestClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    found = stream(client, "/v1/chat/completions", **body)[:-1]
    pieces = [p for e in found for c in e["choices"] if c["logprobs"] for p in c["logprobs"]["content"]]
    assert pieces == whole


def test_an_answer_that_fails_ends_the_stream_with_an_error(client: TestClient) -> None:
    found = stream(client, prompt="!nan", max_tokens=9)
    assert "[DONE]" not in found
    error = found[-1]["error"]
    assert error["message"] == "the state is not finite"
    assert error["type"] == "server_error"
    assert texts(found[:-1]) == {0: "!n"}


def test_an_answer_that_fails_is_a_500(client: TestClient) -> None:
    reply = client.post("/v1/completions", json={"prompt": ["ok", "!nan"], "max_tokens": 9})
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "generation_failed"


def test_what_is_refused_before_the_first_event_is_no_stream(client: TestClient) -> None:
    reply = client.post("/v1/completions", json={"prompt": "x", "stream": True, "temperature": -1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_options_that_need_or_exclude_a_stream(client: TestClient, body: dict[str, Any], param: str) -> None:
    reply = client.post("/v1/completions", json={"prompt": "x"} | body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
