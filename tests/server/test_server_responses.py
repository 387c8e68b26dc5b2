"""Stored responses: the next turn goes on from the very tokens, for their owner, across restarts."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.responses import ResponseIncompleteEvent
from server_program import program
from server_support import events, make_state, serving, wait_until

import checkpoints
from recurra.errors import ConfigError
from recurra.server.stored import DAY, ResponseStore, Stored

SCRIPT = Path(__file__).parent / "serve_model.py"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def _post(client: TestClient, status: int = 200, headers: dict[str, str] | None = None, **body: Any) -> Any:
    reply = client.post("/v1/responses", json={"max_output_tokens": 5} | body, headers=headers)
    assert reply.status_code == status, reply.text
    return reply.json()


def test_a_turn_goes_on_from_the_tokens_of_the_one_before(client: TestClient) -> None:
    first = _post(client, input="hello", instructions="be brief")
    text = first["output"][0]["content"][0]["text"]
    assert text == "syste"  # the fake repeats its prompt
    assert (first["status"], first["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert first["usage"]["input_tokens"] == len("system: be brief\nuser: hello\nassistant: ")
    second = _post(client, input="more", instructions="be brief", previous_response_id=first["id"])
    said = f"system: be brief\nuser: hello\nassistant: {text}\nuser: more\nassistant: "
    assert second["usage"]["input_tokens"] == len(said)
    assert second["previous_response_id"] == first["id"]
    assert _post(client, input="x", previous_response_id=first["id"])["usage"]["input_tokens"] < len(said)


def test_responses_are_read_and_deleted_by_id(client: TestClient) -> None:
    made = _post(client, input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}])
    assert client.get(f"/v1/responses/{made['id']}").json() == made
    gone = client.delete(f"/v1/responses/{made['id']}").json()
    assert gone == {"id": made["id"], "object": "response", "deleted": True}
    assert client.get(f"/v1/responses/{made['id']}").status_code == 404
    assert client.delete(f"/v1/responses/{made['id']}").status_code == 404
    error = _post(client, 404, input="x", previous_response_id=made["id"])["error"]
    assert (error["code"], error["param"]) == ("response_not_found", "previous_response_id")
    unstored = _post(client, input="hi", store=False)
    assert client.get(f"/v1/responses/{unstored['id']}").status_code == 404


def test_a_response_belongs_to_the_key_that_made_it() -> None:
    with serving(make_state(api_keys=["a", "b"])) as client:
        a, b = ({"Authorization": f"Bearer {key}"} for key in "ab")
        made = _post(client, headers=a, input="hello")
        assert client.get(f"/v1/responses/{made['id']}", headers=a).status_code == 200
        assert client.get(f"/v1/responses/{made['id']}", headers=b).status_code == 404
        assert client.delete(f"/v1/responses/{made['id']}", headers=b).status_code == 404
        _post(client, 404, headers=b, input="x", previous_response_id=made["id"])
        assert client.get(f"/v1/responses/{made['id']}").status_code == 401


def test_the_stream_tells_what_the_whole_says(client: TestClient) -> None:
    reply = client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 30, "stream": True})
    lines = [block.split("\n", 1) for block in reply.text.split("\n\n") if block]
    told = events("\n\n".join(data for _, data in lines))
    assert [line for line, _ in lines] == [f"event: {item['type']}" for item in told]
    assert [item["sequence_number"] for item in told] == list(range(len(told)))
    kinds = [item["type"].removeprefix("response.") for item in told]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    deltas = [item["delta"] for item in told if item["type"] == "response.output_text.delta"]
    last = told[-1]["response"]
    assert "".join(deltas) == last["output"][0]["content"][0]["text"]
    assert client.get(f"/v1/responses/{last['id']}").json() == last


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output", "role": "user", "content": "x"}]}, "input"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "text": {"format": {"type": "json_object"}}}, "text"),
        ({"input": "x", "n": 2}, "n"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "nonsense": 1}, "nonsense"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: TestClient, fields: dict[str, Any], param: str
) -> None:
    assert _post(client, 400, **fields)["error"]["param"] == param


def _stored(response_id: str) -> Stored:
    return Stored({"id": response_id}, None, [], "p", [1, 2], "a")


def test_what_is_stored_expires_and_outlives_the_process(tmp_path: Path) -> None:
    clock = [1000.0]
    store = ResponseStore(tmp_path, days=2, now=lambda: clock[0])
    store.put("me", _stored("a"))
    store.close()
    store = ResponseStore(tmp_path, days=2, now=lambda: clock[0])
    assert store.get("me", "a") == _stored("a")
    assert store.get("you", "a") is None
    clock[0] += 2 * DAY
    assert store.get("me", "a") is None
    store.put("me", _stored("b"))
    assert store._db.execute("SELECT id FROM responses").fetchall() == [("b",)]
    store.close()
    with pytest.raises(ConfigError, match="responses_dir"):
        ResponseStore(Path("/proc/nothing"))


def _lines(index: Path) -> int:
    with contextlib.closing(sqlite3.connect(index)) as db:
        return int(db.execute("SELECT count(*) FROM states").fetchone()[0])


def test_openais_client_resumes_across_a_restart_without_the_past(tmp_path: Path) -> None:
    folder = checkpoints.write_mamba2(tmp_path / "tiny", tokenizer=True)
    settings = {"port": 0, "served_model_name": ["tiny"]}
    engine = {
        "model": str(folder), "device": "cpu", "num_threads": 1, "max_num_seqs": 2,
        "chat_template": TEMPLATE, "prefix_cache_dir": str(tmp_path / "states"),
    }  # fmt: skip
    command = [str(SCRIPT), json.dumps(settings), json.dumps(engine)]
    extra = {"ignore_eos": True}
    with program(command) as running:
        running.wait_ready()
        with openai.OpenAI(base_url=running.url + "/v1", api_key="k", max_retries=0) as client:
            first = client.responses.create(
                model="tiny", input="tell me a story", temperature=0.0, max_output_tokens=20, extra_body=extra
            )
            assert first.output_text
            assert first.usage is not None
            assert first.usage.output_tokens == 20
        (index,) = (tmp_path / "states").glob("*/index.sqlite")
        wait_until(lambda: _lines(index) >= 2)  # the prompt's state, and the answer's
        running.process.send_signal(signal.SIGKILL)
    with program(command) as running:
        running.wait_ready()
        with openai.OpenAI(base_url=running.url + "/v1", api_key="k", max_retries=0) as client:
            stream = client.responses.create(
                model="tiny", input="go on", previous_response_id=first.id, temperature=0.0,
                max_output_tokens=20, extra_body=extra, stream=True,
            )  # fmt: skip
            last = list(stream)[-1]
            assert isinstance(last, ResponseIncompleteEvent)
            second = last.response
            assert client.responses.retrieve(second.id).output_text == second.output_text
            client.responses.delete(second.id)
            cold = client.responses.create(
                model="tiny", input="go on", previous_response_id=first.id, temperature=0.0,
                max_output_tokens=20, extra_body={"cache_salt": "cold", **extra},
            )  # fmt: skip
    assert second.usage is not None
    assert cold.usage is not None
    past = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= past
    assert cold.usage.input_tokens_details.cached_tokens == 0
    assert second.output_text == cold.output_text
