"""POST /v1/completions, whole answers."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi.testclient import TestClient
from server_support import make_state, serving

from recurra.sampling_params import SamplingParams
from recurra.server.chat import engine_prompt
from recurra.server.completions import Source, engine_prompts
from recurra.server.messages import EngineInfo
from recurra.server.protocol.chat import ChatRequest
from recurra.server.protocol.completions import CompletionRequest


def complete(client: TestClient, **body: Any) -> Any:
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_shape_of_an_answer(client: TestClient) -> None:
    answer = complete(client, model="fake", prompt="abc", max_tokens=5)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "fake"
    assert answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": "abcab", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_default_is_16_tokens(client: TestClient) -> None:
    assert complete(client, prompt="abc")["usage"]["completion_tokens"] == 16
    assert complete(client, prompt="abc", max_tokens=None)["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (["abc", "x"], ["abca", "xxxx"]),
        ([66, 67], None),
        ([[66, 67], [68]], None),
    ],
)
def test_four_forms_of_a_prompt(client: TestClient, prompt: Any, texts: list[str] | None) -> None:
    answer = complete(client, prompt=prompt, max_tokens=4, temperature=0)
    if texts is None:  # token ids: what the same text gives
        ids = prompt if isinstance(prompt[0], list) else [prompt]
        heads = [client.post("/detokenize", json={"tokens": p}).json()["prompt"] for p in ids]
        texts = [(head * 4)[:4] for head in heads]
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_prompts_times_answers_are_numbered_prompt_by_prompt(client: TestClient) -> None:
    answer = complete(client, prompt=["abc", "xyz"], n=2, max_tokens=2)
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [
        (0, "ab"),
        (1, "bc"),
        (2, "xy"),
        (3, "yz"),
    ]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 8
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


def test_stop_string_and_its_reason(client: TestClient) -> None:
    choice = complete(client, prompt="abcdef", stop=["xx", "de"], max_tokens=20)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "de")
    choice = complete(client, prompt="abcdef", stop="de", include_stop_str_in_output=True)["choices"][0]
    assert choice["text"] == "abcde"


def test_stop_token(client: TestClient) -> None:
    ids = client.post("/tokenize", json={"prompt": "c"}).json()["tokens"]
    choice = complete(client, prompt="abcdef", stop_token_ids=ids)["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("ab", "stop", ids[0])


def test_echo_puts_the_prompt_first(client: TestClient) -> None:
    assert complete(client, prompt="abc", echo=True, max_tokens=2)["choices"][0]["text"] == "abcab"
    ids = client.post("/tokenize", json={"prompt": "hé"}).json()["tokens"]
    assert complete(client, prompt=ids, echo=True, max_tokens=1)["choices"][0]["text"] == "héh"


def test_logprobs_of_the_answer(client: TestClient) -> None:
    lists = complete(client, prompt="ab", logprobs=2, max_tokens=3)["choices"][0]["logprobs"]
    assert lists["tokens"] == ["a", "b", "a"]
    assert lists["text_offset"] == [0, 1, 2]
    for token, logprob, top in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert top[token] == logprob
        assert len(top) == 2
        assert max(top.values()) == -0.4


def test_logprobs_zero_tells_the_token_alone(client: TestClient) -> None:
    lists = complete(client, prompt="ab", logprobs=0, max_tokens=1)["choices"][0]["logprobs"]
    assert lists["token_logprobs"][0] < 0
    assert lists["top_logprobs"] == [None]


def test_offsets_count_characters_not_tokens(client: TestClient) -> None:
    """Three bytes make one character; the token after it begins one character later."""
    choice = complete(client, prompt="漢a", logprobs=0, max_tokens=4, echo=True)["choices"][0]
    assert choice["text"] == "漢a漢a"
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2, 2, 2, 3]


def test_scoring_a_prompt_generates_nothing(client: TestClient) -> None:
    """What evaluation harnesses ask: echo, logprobs, max_tokens 0."""
    answer = complete(client, prompt="abcd", echo=True, logprobs=1, max_tokens=0)
    choice = answer["choices"][0]
    assert choice["text"] == "abcd"
    assert choice["logprobs"]["tokens"] == list("abcd")
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0


def test_prompt_logprobs_have_ids_ranks_and_text(client: TestClient) -> None:
    choice = complete(client, prompt="ab", prompt_logprobs=1, max_tokens=1)["choices"][0]
    first, second = choice["prompt_logprobs"]
    assert first is None
    assert {entry["decoded_token"] for entry in second.values()} == {"b", "c"}
    assert {entry["rank"] for entry in second.values()} == {1, 2}


def test_token_ids_on_request(client: TestClient) -> None:
    ids = client.post("/tokenize", json={"prompt": "ab"}).json()["tokens"]
    choice = complete(client, prompt="ab", max_tokens=3, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == ids
    assert choice["token_ids"] == [*ids, ids[0]]
    lists = complete(client, prompt="ab", max_tokens=1, logprobs=0, return_tokens_as_token_ids=True)[
        "choices"
    ][0]
    assert lists["logprobs"]["tokens"] == [f"token_id:{ids[0]}"]


def test_fields_that_ask_for_nothing_pass(client: TestClient) -> None:
    complete(
        client, prompt="a", suffix=None, best_of=1, user="me", tools=[], response_format={"type": "text"}
    )
    complete(client, prompt="a", n=2, best_of=2)


def test_the_checkpoints_sampling_defaults_fill_what_a_request_leaves_out() -> None:
    own: dict[str, float | int] = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 77}
    info = EngineInfo(258, 1000, None, "Fake", own)

    def params(**fields: Any) -> SamplingParams:
        body = CompletionRequest(prompt=[65], **fields)
        (prompt,) = engine_prompts(body, [Source([65], "")], info, True)
        return prompt.params

    expected = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=77)
    assert params() == params(temperature=None) == expected
    explicit = params(temperature=0.0, top_p=1.0, max_tokens=3)
    assert explicit == SamplingParams(temperature=0.0, top_p=1.0, top_k=20, max_tokens=3)
    chatting = ChatRequest(messages=[{"role": "user", "content": "x"}])  # type: ignore[list-item]
    assert engine_prompt(chatting, [65], info, 4096).params == expected


def test_without_a_tokenizer_ids_go_in_and_out() -> None:
    with serving(make_state(tokenizer=None)) as client:
        answer = complete(client, prompt=[5, 6], max_tokens=3, logprobs=1, return_token_ids=True)
        choice = answer["choices"][0]
        assert choice["token_ids"] == [5, 6, 5]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:5"]
        for path, body in (
            ("/v1/completions", {"prompt": "text"}),
            ("/v1/completions", {"prompt": [1], "stop": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            reply = client.post(path, json=body)
            assert reply.status_code == 400
            assert reply.json()["error"]["code"] == "no_tokenizer"
