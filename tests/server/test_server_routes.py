"""The small routes."""

from __future__ import annotations

from fastapi.testclient import TestClient
from server_support import make_state, metric, serving

from recurra import __version__


def test_models() -> None:
    with serving(make_state(served_model_name=("org/big", "small"))) as client:
        listed = client.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["org/big", "small"]
        card = client.get("/v1/models/org/big").json()
        assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "recurra", 1000)
        reply = client.post("/v1/completions", json={"model": "small", "prompt": "a"})
        assert reply.json()["model"] == "small"


def test_version(client: TestClient) -> None:
    assert client.get("/version").json() == {"version": __version__}


def test_tokens_there_and_back(client: TestClient) -> None:
    reply = client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert reply["count"] == 3
    assert reply["max_model_len"] == 1000
    assert reply["token_strs"] == ["h", "�", "�"]
    assert client.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "hé"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    assert client.post("/detokenize", json={"tokens": [256, *reply["tokens"]]}).json() == {
        "prompt": "<bos>hé"
    }


def test_tokenize_a_chat(client: TestClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert client.post("/tokenize", json=body).json()["count"] == len("user: x\nassistant: ")
    body["add_generation_prompt"] = False
    assert client.post("/tokenize", json=body).json()["count"] == len("user: x\n")


def test_tokenize_refusals(client: TestClient) -> None:
    for body in (
        {},
        {"prompt": "a", "messages": [{"role": "user", "content": "x"}]},
        {"prompt": ""},
        {"prompt": 3},
    ):
        assert client.post("/tokenize", json=body).status_code == 400
    for body in ({}, {"tokens": "a"}, {"tokens": [258]}, {"tokens": [-1]}, {"tokens": [2**70]}):
        assert client.post("/detokenize", json=body).status_code == 400


def test_a_long_text_is_tokenised_off_the_event_loop(client: TestClient) -> None:
    assert client.post("/tokenize", json={"prompt": "a" * 50_000}).json()["count"] == 50_000


def test_metrics_count_tokens_and_times() -> None:
    with serving(make_state()) as client:
        client.post("/v1/completions", json={"prompt": ["ab", "c"], "n": 2, "max_tokens": 5})
        assert metric(client, "recurra_prompt_tokens_total") == 3
        assert metric(client, "recurra_generation_tokens_total") == 20
        assert metric(client, "recurra_cached_prompt_tokens_total") == 2
        assert metric(client, "recurra_time_to_first_token_seconds_count") == 2
        assert metric(client, "recurra_time_between_tokens_seconds_count") == 8
        assert metric(client, "recurra_request_seconds_count") == 2
        assert metric(client, 'recurra_requests_finished_total{reason="length"}') == 4
        assert metric(client, 'recurra_http_requests_total{route="/v1/completions",status="200"}') == 1
        assert metric(client, "recurra_state_slots_free") == 4


def test_openapi_describes_the_bodies(client: TestClient) -> None:
    schema = client.get("/openapi.json").json()
    assert "/v1/chat/completions" in schema["paths"]
    assert "prompt" in schema["components"]["schemas"]["CompletionRequest"]["properties"]


def test_browsers_may_call_where_allowed() -> None:
    with serving(make_state(cors_origins=("https://a.example",), api_keys=("k",))) as client:
        ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
        reply = client.options("/v1/completions", headers=ask)
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        reply = client.post("/v1/completions", json={"prompt": "a"}, headers={"origin": "https://a.example"})
        assert reply.status_code == 401  # readable for the page all the same
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
