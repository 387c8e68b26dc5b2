"""The whole way with a real (tiny) model: OpenAI's client, HTTP, two processes, an engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from server_program import Program, program
from server_support import metric, wait_until

import checkpoints

KEY = "sk-test"
SCRIPT = Path(__file__).parent / "serve_model.py"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    folder = checkpoints.write_mamba2(tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 9, "eos_token_id": 0}')
    settings = {"port": 0, "api_keys": [KEY], "served_model_name": ["tiny"], "restart_backoff": 0.05}
    engine = {
        "model": str(folder), "device": "cpu", "num_threads": 1, "max_num_seqs": 3, "max_queue_len": 4,
        "max_model_len": 20_000, "chat_template": TEMPLATE,
    }  # fmt: skip
    with program([str(SCRIPT), json.dumps(settings), json.dumps(engine)]) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def client(server: Program) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_checkpoints_defaults_hold_until_a_request_names_the_field(client: openai.OpenAI) -> None:
    def tokens(**fields: Any) -> int:
        extra = {"ignore_eos": True}
        answer = client.completions.create(model="tiny", prompt="A state", extra_body=extra, **fields)
        assert answer.usage is not None
        return answer.usage.completion_tokens

    assert (tokens(), tokens(max_tokens=4), tokens(max_tokens=20)) == (9, 4, 20)
    messages: Any = [{"role": "user", "content": "hello"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 9


def test_streamed_and_whole_completions_say_the_same(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["A state space", "漢字"],
        "max_tokens": 30,
        "n": 2,
        "seed": 5,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**ask)
    texts = dict.fromkeys(range(4), "")
    usage = None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 120
    assert texts[0] != texts[1]


def test_chat_with_logprobs(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {
        "model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 12,
        "temperature": 0, "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**ask).choices[0]
    pieces = [c.choices[0] for c in client.chat.completions.create(**ask, stream=True)]
    assert "".join(piece.delta.content or "" for piece in pieces) == whole.message.content
    assert whole.logprobs is not None
    content = whole.logprobs.content
    assert content is not None
    assert len(content) == 12
    for entry in content:  # greedy: the token taken is the likeliest
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
    assert pieces[-1].finish_reason == whole.finish_reason


def test_scoring_equals_generating(client: openai.OpenAI) -> None:
    """What an answer's tokens were worth when they were drawn, they are worth when they are scored."""
    prompt = [33, 289, 258]
    made = client.completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=6,
        logprobs=1,
        temperature=0,
        extra_body={"return_token_ids": True},
    ).choices[0]
    ids = [*prompt, *made.token_ids]  # type: ignore[attr-defined]
    scored = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logprobs=1).choices[
        0
    ]
    assert made.logprobs is not None
    assert scored.logprobs is not None
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[3:] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)


def test_errors_are_the_clients_own(client: openai.OpenAI, server: Program) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="tiny", prompt="x", temperature=-1)
    with pytest.raises(openai.BadRequestError, match="20000 tokens"):
        client.completions.create(model="tiny", prompt=[1] * 20_001)
    stranger = client.with_options(api_key="sk-wrong")
    with pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model="tiny", prompt="x")
    assert "sk-wrong" not in server.log


def test_overload_and_leaving(client: openai.OpenAI, server: Program) -> None:
    """Three run, four wait, one is refused; then all leave, and every slot is free again."""

    def ask(seconds: float) -> None:
        patient = client.with_options(timeout=seconds)
        patient.completions.create(
            model="tiny", prompt="x", max_tokens=15_000, extra_body={"ignore_eos": True}
        )

    with ThreadPoolExecutor(7) as pool:
        jobs = [pool.submit(ask, 4.0) for _ in range(3)]
        wait_until(lambda: metric(server, "recurra_state_slots_used") == 3)
        jobs += [pool.submit(ask, 2.5) for _ in range(4)]
        wait_until(lambda: metric(server, "recurra_requests_waiting") == 4)
        with pytest.raises(openai.RateLimitError) as refused:
            ask(2.5)
        assert refused.value.response.headers["retry-after"]
        for job in jobs:
            assert isinstance(job.exception(), openai.APITimeoutError)
    wait_until(lambda: metric(server, "recurra_requests_waiting") == 0)
    wait_until(lambda: metric(server, "recurra_state_slots_used") == 0)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices


def test_kill_the_engine_mid_stream(client: openai.OpenAI, server: Program) -> None:
    stream = client.completions.create(
        model="tiny", prompt="x", max_tokens=15_000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    server.engine().kill()
    with pytest.raises(openai.APIError, match="engine process ended"):
        for _ in stream:
            pass
    with pytest.raises(openai.InternalServerError) as down:
        client.completions.create(model="tiny", prompt="x")
    assert down.value.status_code == 503
    assert server.get("/health").status_code == 503
    wait_until(lambda: server.get("/health").status_code == 200, 60)
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices
