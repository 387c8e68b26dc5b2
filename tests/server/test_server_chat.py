"""POST /v1/chat/completions, whole answers."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from server_support import make_state, serving

USER = {"role": "user", "content": "hi"}


def chat(client: TestClient, **body: Any) -> Any:
    reply = client.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 8} | body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def refusal(client: TestClient, **body: Any) -> Any:
    reply = client.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 8} | body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_shape_of_an_answer(client: TestClient) -> None:
    answer = chat(client)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "user: hi", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")


def test_all_roles_and_content_parts(client: TestClient) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "a"},
        {"role": "developer", "content": "d", "name": "x"},
    ]
    answer = chat(client, messages=messages, max_tokens=42)
    assert answer["choices"][0]["message"]["content"] == "system: s\nuser: one\ntwo\nassistant: a\ndevel"


def test_template_arguments(client: TestClient) -> None:
    bare = chat(client, add_generation_prompt=False)["usage"]["prompt_tokens"]
    moody = chat(client, chat_template_kwargs={"mood": "calm"})["usage"]["prompt_tokens"]
    assert bare == len("user: hi\n")
    assert moody == len("user: hi\nassistant: calm")
    error = refusal(client, chat_template_kwargs={"messages": []})
    assert error["param"] == "chat_template_kwargs"


def test_continue_the_final_message(client: TestClient) -> None:
    messages = [USER, {"role": "assistant", "content": "I th"}]
    answer = chat(client, messages=messages, add_generation_prompt=False, continue_final_message=True)
    assert answer["usage"]["prompt_tokens"] == len("user: hi\nassistant: I th")
    assert (
        refusal(client, messages=messages, continue_final_message=True)["param"] == "continue_final_message"
    )


def test_several_answers(client: TestClient) -> None:
    answer = chat(client, n=3, max_tokens=4)
    assert [c["message"]["content"] for c in answer["choices"]] == ["user", "ser:", "er: "]
    assert answer["usage"]["completion_tokens"] == 12


def test_length_limits(client: TestClient) -> None:
    assert chat(client, max_tokens=None, max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert chat(client, max_tokens=5, max_completion_tokens=2)["usage"]["completion_tokens"] == 2
    assert refusal(client, max_tokens=0)["param"] == "max_tokens"


def test_default_length_limit() -> None:
    """An answer of a recurrent model would have no end of its own."""
    with serving(make_state(default_chat_max_tokens=11)) as client:
        assert chat(client, max_tokens=None)["usage"]["completion_tokens"] == 11
    with serving(make_state(default_chat_max_tokens=None)) as client:
        assert chat(client, max_tokens=None)["usage"]["total_tokens"] == 1000


def test_logprobs(client: TestClient) -> None:
    choice = chat(
        client, messages=[{"role": "user", "content": "x"}], max_tokens=2, logprobs=True, top_logprobs=2
    )
    content = choice["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["u", "s"]
    assert content[0]["bytes"] == [ord("u")]
    top = content[0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == sorted((e["logprob"] for e in top), reverse=True)
    assert len(top) == 2


def test_chosen_token_below_the_top_is_not_among_them(client: TestClient) -> None:
    entry = chat(client, logprobs=True, top_logprobs=1)["choices"][0]["logprobs"]["content"][0]
    assert entry["token"] == "u"
    assert [top["token"] for top in entry["top_logprobs"]] == ["v"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [USER, {"role": "system", "content": "late"}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
def test_refusals_name_the_field(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = refusal(client, **body)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_no_chat_template() -> None:
    from fake_engine import byte_tokenizer

    with serving(make_state(tokenizer=byte_tokenizer(chat=False))) as client:
        assert refusal(client)["code"] == "no_chat_template"
