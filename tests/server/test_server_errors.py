"""What is refused, how it is said, and that nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeConfig
from fastapi.testclient import TestClient
from server_support import make_state, metric, serving, wait_until

COMPLETIONS = "/v1/completions"


def problem(reply: Any, status: int) -> Any:
    assert reply.status_code == status, reply.text
    assert reply.headers["x-request-id"]
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [258]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": ["a"] * 3000}, "prompt"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.1}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "min_p": 2}, "min_p"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 10**30}, "n"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "a", "n": 1.5}, "n"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1000}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**18}, "max_tokens"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens"),
        ({"prompt": "a", "stop": ["x"] * 10_000}, "stop"),
        ({"prompt": "a", "stop": [1]}, "stop"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop"),
        ({"prompt": "a", "stop_token_ids": [258]}, "stop_token_ids"),
        ({"prompt": "a", "logit_bias": {"258": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
        ({"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
        ({"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
        ({"prompt": "a", "logprobs": 101}, "logprobs"),
        ({"prompt": "a", "logprobs": -1}, "logprobs"),
        ({"prompt": "a", "best_of": 2}, "best_of"),
        ({"prompt": "a", "suffix": "z"}, "suffix"),
        ({"prompt": "a", "guided_json": {}, "structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "stream_options": 1, "stream": True}, "stream_options"),
        ({"prompt": "a", "max_token": 3}, "max_token"),
    ],
)
def test_400_names_the_field(client: TestClient, body: dict[str, Any], param: str) -> None:
    error = problem(client.post(COMPLETIONS, json=body), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 1000


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(client: TestClient, literal: str) -> None:
    for field in ("temperature", "top_p", "presence_penalty"):
        content = f'{{"prompt": "a", "{field}": {literal}}}'
        assert problem(client.post(COMPLETIONS, content=content), 400)["param"] == field


def test_an_unknown_field_is_refused_with_a_suggestion(client: TestClient) -> None:
    error = problem(client.post(COMPLETIONS, json={"prompt": "a", "temprature": 1}), 400)
    assert "did you mean temperature?" in error["message"]


def test_unknown_fields_can_be_ignored() -> None:
    with serving(make_state(unknown_fields="ignore")) as client:
        assert client.post(COMPLETIONS, json={"prompt": "a", "temprature": 1}).status_code == 200
        assert client.post(COMPLETIONS, json={"prompt": "a", "suffix": "z"}).status_code == 400


def test_too_long_says_so(client: TestClient) -> None:
    error = problem(client.post(COMPLETIONS, json={"prompt": "a" * 1000}), 400)
    assert error["code"] == "context_length_exceeded"
    messages = [{"role": "user", "content": "a" * 1000}]
    error = problem(client.post("/v1/chat/completions", json={"messages": messages}), 400)
    assert error["code"] == "context_length_exceeded"
    # The longest request that fits, with nothing to spare.
    reply = client.post(COMPLETIONS, json={"prompt": "a" * 984})
    assert reply.json()["usage"]["total_tokens"] == 1000
    assert client.post(COMPLETIONS, json={"prompt": "a" * 1000, "max_tokens": 0}).status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b'{"prompt": "a"',
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"[]",
        b"3",
        b'"x"',
        b'{"prompt": "a",}',
    ],
)
def test_broken_json(client: TestClient, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    problem(client.post(COMPLETIONS, content=content, headers=headers), 400)


def test_lone_surrogates(client: TestClient) -> None:
    for body in (
        '{"prompt": "\\ud800"}',
        '{"prompt": "a", "stop": "\\ud800"}',
        '{"prompt": "a", "model": "\\ud800"}',
    ):
        problem(client.post(COMPLETIONS, content=body), 400)
    problem(client.post("/tokenize", content='{"prompt": "\\udfff"}'), 400)
    chat = '{"messages": [{"role": "user", "content": "\\udfff"}]}'
    problem(client.post("/v1/chat/completions", content=chat), 400)


def test_wrong_content_type_says_what_to_send(client: TestClient) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    error = problem(client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers), 400)
    assert "Content-Type: application/json" in error["message"]


def test_unknown_model(client: TestClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        error = problem(client.post(path, json={"model": "gpt-9"} | body), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "'fake'" in error["message"]
    assert problem(client.get("/v1/models/gpt-9"), 404)["code"] == "model_not_found"


def test_unknown_route_and_method(client: TestClient) -> None:
    assert problem(client.get("/v1/nothing"), 404)["code"] == "not_found"
    reply = client.get(COMPLETIONS)
    assert problem(reply, 405)["code"] == "method_not_allowed"
    assert reply.headers["allow"] == "POST"


def test_a_bug_while_queueing_harms_nobody_else(client: TestClient) -> None:
    error = problem(client.post(COMPLETIONS, json={"prompt": ["ok", "!bug"]}), 500)
    assert "AccidentError" in error["message"]
    assert client.post(COMPLETIONS, json={"prompt": "ok"}).status_code == 200


@pytest.fixture(scope="module")
def locked() -> Iterator[TestClient]:
    with serving(make_state(api_keys=("first-key", "second-key"))) as client:
        yield client


@pytest.fixture(scope="module")
def small() -> Iterator[TestClient]:
    with serving(make_state(max_body_bytes=2000)) as client:
        yield client


class TestKeys:
    @pytest.mark.parametrize(
        "header",
        [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic first-key", "first-key", "Bearer first-key2"],
    )
    def test_refused(self, locked: TestClient, header: str | None) -> None:
        headers = {} if header is None else {"authorization": header}
        for method, path in (
            ("POST", COMPLETIONS),
            ("GET", "/v1/models"),
            ("POST", "/tokenize"),
            ("GET", "/nothing"),
        ):
            reply = locked.request(method, path, headers=headers, json={"prompt": "a"})
            assert problem(reply, 401)["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("header", ["Bearer first-key", "bearer second-key", "Bearer  first-key "])
    def test_let_in(self, locked: TestClient, header: str) -> None:
        assert (
            locked.post(COMPLETIONS, headers={"authorization": header}, json={"prompt": "a"}).status_code
            == 200
        )

    @pytest.mark.parametrize("path", ["/health", "/version", "/metrics"])
    def test_open_to_machines(self, locked: TestClient, path: str) -> None:
        assert locked.get(path).status_code == 200


class TestBodySize:
    def test_announced(self, small: TestClient) -> None:
        error = problem(small.post(COMPLETIONS, json={"prompt": "a" * 2000}), 413)
        assert error["code"] == "body_too_large"

    def test_chunked(self, small: TestClient) -> None:
        def chunks() -> Iterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        problem(small.post(COMPLETIONS, content=chunks()), 413)

    def test_just_fits(self, small: TestClient) -> None:
        content = json.dumps({"prompt": "a", "max_tokens": 1}).ljust(2000).encode()
        assert len(content) == 2000
        assert small.post(COMPLETIONS, content=content).status_code == 200
        problem(small.post(COMPLETIONS, content=content + b" "), 413)

    def test_nonsense_length(self, small: TestClient) -> None:
        problem(small.post(COMPLETIONS, content=b"{}", headers={"content-length": "-3"}), 413)


class TestQueue:
    def test_overload_is_429_with_retry_after(self) -> None:
        """One runs, one waits; the next is refused, and the others are none the worse."""
        engine = FakeConfig(max_queue_len=1, max_num_seqs=1, step_seconds=0.02)
        with serving(make_state(engine)) as client:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(2) as pool:
                body = {"prompt": "a", "max_tokens": 30}
                first = pool.submit(client.post, COMPLETIONS, json=body)
                wait_until(lambda: metric(client, "recurra_requests_running") == 1)
                second = pool.submit(client.post, COMPLETIONS, json=body)
                wait_until(lambda: metric(client, "recurra_requests_waiting") == 1)
                for stream in (False, True):
                    reply = client.post(COMPLETIONS, json=body | {"stream": stream})
                    error = problem(reply, 429)
                    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
                    assert int(reply.headers["retry-after"]) >= 1
                assert first.result().status_code == second.result().status_code == 200
            wait_until(lambda: metric(client, "recurra_state_slots_free") == 1)
            assert metric(client, 'recurra_errors_total{kind="queue_full"}') == 2

    def test_a_call_is_queued_whole_or_not_at_all(self) -> None:
        engine = FakeConfig(max_queue_len=3, max_num_seqs=1, step_seconds=0.01)
        with serving(make_state(engine)) as client:
            error = problem(client.post(COMPLETIONS, json={"prompt": ["a"] * 4}), 400)
            assert "at most 3" in error["message"]
            assert client.post(COMPLETIONS, json={"prompt": ["a"] * 3, "max_tokens": 1}).status_code == 200


def test_errors_are_counted(client: TestClient) -> None:
    def count() -> float:
        try:
            return metric(client, 'recurra_errors_total{kind="unknown_field"}')
        except KeyError:
            return 0.0

    before = count()
    problem(client.post(COMPLETIONS, json={"prompt": "a", "nonsense": 1}), 400)
    assert count() == before + 1
