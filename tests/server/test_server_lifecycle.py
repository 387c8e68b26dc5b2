"""Start, death and return of the engine, clients that leave, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_engine import FakeConfig, build_fake
from fastapi.testclient import TestClient
from server_support import EngineThread, events, make_state, metric, serving, wait_until

from recurra.errors import CheckpointError, ConfigError, EngineDeadError
from recurra.server.app import create_app
from recurra.server.state import ServerState, shutting_down
from recurra.server.supervisor import Phase, RestartPolicy

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "abc", "max_tokens": 900}


class GatedFactory:
    """Builds an engine once it is allowed to."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __call__(self, config: FakeConfig, progress: Callable[[str, int, int], None]) -> Any:
        progress("loading weights", 1, 4)
        assert self.gate.wait(10)
        return build_fake(config, progress)


def test_health_follows_the_engine() -> None:
    factory = GatedFactory()
    state = make_state(launch=lambda: EngineThread(FakeConfig(), factory))
    with serving(state, ready=False) as client:
        wait_until(lambda: "progress" in client.get("/health").json())
        reply = client.get("/health")
        assert reply.status_code == 503
        assert reply.json() == {
            "status": "starting",
            "progress": {"stage": "loading weights", "done": 1, "total": 4},
        }
        reply = client.post(COMPLETIONS, json={"prompt": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_starting")
        assert reply.headers["retry-after"] == "5"
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert metric(client, "recurra_engine_up") == 0
        factory.gate.set()
        wait_until(lambda: client.get("/health").status_code == 200)
        assert client.get("/health").json() == {"status": "ok"}
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 1000
        assert metric(client, "recurra_engine_up") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_503_and_comes_back(stream: bool) -> None:
    state = make_state(FakeConfig(step_seconds=0.005))
    with serving(state) as client, ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(client.post, COMPLETIONS, json=LONG | {"stream": stream})
        wait_until(lambda: metric(client, "recurra_requests_running") == 1)
        reply = client.post(COMPLETIONS, json={"prompt": "!crash"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
        lost = bystander.result()
        if stream:
            last = events(lost.text)[-1]
            assert last["error"]["code"] == "engine_dead"
        else:
            assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_dead")
        wait_until(lambda: client.get("/health").status_code == 200)
        assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200
        assert metric(client, "recurra_engine_restarts_total") == 1
        assert metric(client, "recurra_state_slots_free") == 4
        assert metric(client, 'recurra_requests_finished_total{reason="error"}') == 2


def test_between_death_and_return_everything_is_503() -> None:
    state = make_state()
    state.supervisor.policy = RestartPolicy(0.3, 0.3, 3)
    with serving(state) as client:
        client.post(COMPLETIONS, json={"prompt": "!crash"})
        reply = client.get("/health")
        assert (reply.status_code, reply.json()["status"]) == (503, "restarting")
        reply = client.post(COMPLETIONS, json={"prompt": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
        wait_until(lambda: client.get("/health").status_code == 200)


def test_an_engine_that_keeps_dying_is_given_up() -> None:
    gave_up = threading.Event()
    state = make_state()
    state.supervisor.gave_up = gave_up.set
    with serving(state) as client:
        while not gave_up.is_set():
            client.post(COMPLETIONS, json={"prompt": "!crash"})
        assert "4 times in a row" in str(state.supervisor.failure)
        assert state.supervisor.phase is Phase.STOPPED
        assert metric(client, "recurra_engine_restarts_total") == 3


def test_pauses_grow() -> None:
    policy = RestartPolicy(1.0, 30.0, 5)
    assert [policy.pause(n) for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize(
    ("fail", "kind", "said"),
    [
        ("configuration", ConfigError, "max_num_seqs=-1: negative. Use 1 or more."),
        ("checkpoint", CheckpointError, "no weights here"),
        ("memory", EngineDeadError, "the engine could not start: MemoryError: out of memory"),
    ],
)
def test_a_first_start_that_fails_ends_the_server(fail: str, kind: type[Exception], said: str) -> None:
    gave_up = threading.Event()
    state = make_state(FakeConfig(fail=fail))
    state.supervisor.gave_up = gave_up.set
    with serving(state, ready=False) as client:
        assert gave_up.wait(10)
        assert type(state.supervisor.failure) is kind
        assert str(state.supervisor.failure) == said
        assert client.get("/health").json()["status"] == "stopped"
        assert client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 503


def test_a_configuration_error_at_a_restart_is_final() -> None:
    built = []

    def factory(config: FakeConfig, progress: Callable[[str, int, int], None]) -> Any:
        if built:
            raise ConfigError("model", "folder", "it is gone.")
        built.append(1)
        return build_fake(config, progress)

    gave_up = threading.Event()
    state = make_state(launch=lambda: EngineThread(FakeConfig(), factory))
    state.supervisor.gave_up = gave_up.set
    with serving(state) as client:
        client.post(COMPLETIONS, json={"prompt": "!crash"})
        assert gave_up.wait(10)
        assert isinstance(state.supervisor.failure, ConfigError)


def test_while_draining_new_requests_are_refused_and_old_ones_finish() -> None:
    state = make_state(FakeConfig(step_seconds=0.005))
    with serving(state) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, COMPLETIONS, json={"prompt": "abc", "max_tokens": 60})
        wait_until(lambda: state.in_flight == 1)
        state.draining = True
        reply = client.post(COMPLETIONS, json={"prompt": "a"})
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        assert reply.headers["connection"] == "close"
        assert client.get("/health").json() == {"status": "stopping"}
        assert running.result().json()["usage"]["completion_tokens"] == 60
        wait_until(lambda: state.in_flight == 0)


def test_calls_that_are_given_up_are_told() -> None:
    """What a stop does once its patience ends."""
    state = make_state(FakeConfig(step_seconds=0.005))
    with serving(state) as client, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(client.post, COMPLETIONS, json=LONG)
        stream = pool.submit(client.post, COMPLETIONS, json=LONG | {"stream": True})
        wait_until(lambda: metric(client, "recurra_requests_running") == 2)
        assert client.portal is not None
        client.portal.call(state.supervisor.abort_calls, shutting_down())
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "shutting_down")
        found = events(stream.result().text)
        assert found[-1]["error"]["code"] == "shutting_down"
        assert "[DONE]" not in found
        wait_until(lambda: metric(client, "recurra_state_slots_used") == 0)


class _Connection:
    """One request at ASGI level, whose client can leave."""

    def __init__(self, app: Any, body: dict[str, Any]) -> None:
        self.gone = asyncio.Event()
        self.sent: list[Any] = []
        self._messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"mine")]
        scope = {
            "type": "http", "method": "POST", "path": COMPLETIONS, "raw_path": COMPLETIONS.encode(),
            "query_string": b"", "headers": headers, "client": ("test", 1), "server": ("test", 2),
            "scheme": "http", "root_path": "", "http_version": "1.1", "asgi": {"spec_version": "2.3"},
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._messages:
            return self._messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come true in time")


@pytest.mark.parametrize(
    "body", [LONG, LONG | {"stream": True}, {"prompt": ["a", "b"], "n": 2, "max_tokens": 900}]
)
@pytest.mark.parametrize("when", ["running", "waiting"])
def test_a_client_that_leaves_frees_its_slots(body: dict[str, Any], when: str) -> None:
    engine = FakeConfig(step_seconds=0.005, max_num_seqs=2)
    state = make_state(engine)

    def gauge(name: str) -> float:
        return float(state.metrics.registry.get_sample_value(f"recurra_{name}") or 0)

    async def leave() -> None:
        app = create_app(state)
        async with app.router.lifespan_context(app):
            await _until(lambda: state.supervisor.phase is Phase.READY)
            others = [_Connection(app, LONG) for _ in range(2 if when == "waiting" else 0)]
            await _until(lambda: gauge("requests_running") == len(others))
            connection = _Connection(app, body)
            await _until(lambda: gauge(f"requests_{when}") >= 1)
            connection.gone.set()
            await asyncio.wait_for(connection.task, 5)
            await _until(lambda: gauge("requests_waiting") == 0 and gauge("state_slots_used") == len(others))
            assert state.in_flight == len(others)
            for other in others:
                other.gone.set()
                await other.task
            await _until(lambda: gauge("state_slots_free") == 2)

    asyncio.run(leave())


def test_one_failed_prompt_frees_the_others(client: TestClient) -> None:
    reply = client.post(COMPLETIONS, json={"prompt": ["!nan", "abc"], "max_tokens": 900})
    assert reply.status_code == 500
    wait_until(lambda: metric(client, "recurra_state_slots_used") == 0)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level("INFO", logger="recurra")
    return caplog


def test_request_ids_are_kept_returned_and_logged(
    client: TestClient, logged: pytest.LogCaptureFixture
) -> None:
    reply = client.post(COMPLETIONS, json={"prompt": "secret words"}, headers={"x-request-id": "trace-7"})
    assert reply.headers["x-request-id"] == "trace-7"
    assert reply.json()["id"] == "cmpl-trace-7"
    fields = next(r.fields for r in logged.records if getattr(r, "fields", {}).get("request_id") == "trace-7")
    assert fields["status"] == 200
    assert fields["prompt_tokens"] == 12
    assert fields["completion_tokens"] == 16
    assert fields["finish"] == "length"
    assert "secret" not in "".join(str(vars(record)) for record in logged.records)


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ü"])
def test_a_bad_request_id_is_replaced(client: TestClient, given: str) -> None:
    reply = client.get("/version", headers={"x-request-id": given.encode()})
    assert reply.headers["x-request-id"] not in ("", given)
    assert len(reply.headers["x-request-id"]) == 32


def test_one_id_used_twice_at_once_is_two_requests() -> None:
    state: ServerState = make_state(FakeConfig(step_seconds=0.002))
    with serving(state) as client, ThreadPoolExecutor(4) as pool:
        headers = {"x-request-id": "same"}
        jobs = [
            pool.submit(client.post, COMPLETIONS, json={"prompt": text, "max_tokens": 30}, headers=headers)
            for text in "wxyz"
        ]
        assert [job.result().json()["choices"][0]["text"] for job in jobs] == [c * 30 for c in "wxyz"]
