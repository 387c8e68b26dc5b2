"""The server as a program on the fake engine: signals, processes, sockets, exit codes."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from server_program import Program, program
from server_support import events, metric, wait_until

from recurra.config.server import ServerConfig
from recurra.errors import ConfigError
from recurra.server.run import listening_socket

SCRIPT = Path(__file__).parent / "serve_fake.py"
COMPLETIONS = "/v1/completions"
KEY = "sk-very-secret-key"


@contextlib.contextmanager
def fake_server(server: dict[str, Any] | None = None, **engine: Any) -> Iterator[Program]:
    settings = {"port": 0} | (server or {})
    with program([str(SCRIPT), json.dumps(settings), json.dumps(engine)]) as running:
        yield running


@pytest.fixture(scope="module")
def shared() -> Iterator[Program]:
    """One server for the tests that leave it running."""
    settings = {"log_format": "json", "max_body_bytes": 1 << 20, "restart_backoff": 0.05}
    with fake_server(settings, step_seconds=0.01) as running:
        running.wait_ready()
        yield running


def streamed(running: Program, **body: Any) -> list[Any]:
    """A stream read to its end."""
    reply = running.post(COMPLETIONS, stream=True, **body)
    assert reply.status_code == 200, reply.text
    return events(reply.text)


def test_ten_megabytes_are_refused_and_the_client_reads_it(shared: Program) -> None:
    body = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'
    reply = httpx.post(shared.url + COMPLETIONS, content=body, timeout=20)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_ten_megabytes_in_chunks_are_refused_early(shared: Program) -> None:
    sent = 0

    def chunks() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(200):
            sent += 50_000
            yield b"a" * 50_000

    reply = httpx.post(shared.url + COMPLETIONS, content=chunks(), timeout=20)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")


def test_an_endless_body_is_refused_before_it_ends(shared: Program) -> None:
    host, port = shared.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head.encode())
        for _ in range(40):
            sock.sendall(b"8000\r\n" + b"a" * 0x8000 + b"\r\n")
        assert sock.recv(100).startswith(b"HTTP/1.1 413 ")


def test_curl_waits_for_leave_to_send(shared: Program) -> None:
    """Expect: 100-continue with a large length gets the refusal instead of the go-ahead."""
    host, port = shared.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nExpect: 100-continue\r\n\r\n"
        started = time.monotonic()
        sock.sendall(head.encode())
        received = b"".join(iter(lambda: sock.recv(4096), b""))
        assert received.startswith(b"HTTP/1.1 413 ")
        assert time.monotonic() - started < 1.5


def test_a_client_that_leaves_frees_its_slot(shared: Program) -> None:
    body = {"prompt": "abc", "max_tokens": 900}
    with httpx.stream("POST", shared.url + COMPLETIONS, json=body | {"stream": True}, timeout=10) as reply:
        lines = reply.iter_lines()
        assert next(lines).startswith("data: ")
        wait_until(lambda: metric(shared, "recurra_state_slots_used") == 1)
    wait_until(lambda: metric(shared, "recurra_state_slots_used") == 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(shared.url + COMPLETIONS, json=body, timeout=0.5)
    wait_until(lambda: metric(shared, 'recurra_requests_finished_total{reason="abort"}') == 2)
    wait_until(lambda: metric(shared, "recurra_state_slots_used") == 0)
    wait_until(lambda: shared.log.count('"client_gone": true') == 2)


def test_kill_the_engine_and_it_comes_back(shared: Program) -> None:
    before = shared.engine().pid
    with ThreadPoolExecutor(2) as pool:
        stream = pool.submit(streamed, shared, prompt="abc", max_tokens=900)
        whole = pool.submit(shared.post, COMPLETIONS, prompt="abc", max_tokens=900)
        wait_until(lambda: metric(shared, "recurra_state_slots_used") == 2)
        shared.engine().kill()
        assert stream.result()[-1]["error"]["code"] == "engine_dead"
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "engine_dead")
    reply = shared.get("/health")
    assert (reply.status_code, reply.json()["status"]) in ((503, "restarting"), (200, "ok"))
    wait_until(lambda: shared.get("/health").status_code == 200, 30)
    assert shared.post(COMPLETIONS, prompt="ab", max_tokens=3).json()["choices"][0]["text"] == "aba"
    assert shared.engine().pid != before
    assert metric(shared, "recurra_engine_restarts_total") >= 1


def test_an_idle_engine_uses_no_processor(shared: Program) -> None:
    wait_until(lambda: shared.get("/health").status_code == 200, 30)
    engine = shared.engine()
    before = sum(engine.cpu_times()[:2])
    time.sleep(0.5)
    assert sum(engine.cpu_times()[:2]) - before < 0.05


def test_log_lines_are_json_without_prompts(shared: Program) -> None:
    shared.post(COMPLETIONS, prompt="my secret diary", max_tokens=2)
    wait_until(lambda: '"completion_tokens": 2' in shared.log)
    assert all(json.loads(line) for line in shared.lines)
    assert "diary" not in shared.log


def test_the_first_signal_lets_requests_finish() -> None:
    with (
        fake_server({"api_keys": [KEY], "port": 0}, step_seconds=0.02) as running,
        ThreadPoolExecutor(1) as pool,
    ):
        running.wait_ready()
        engine = running.engine()
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"prompt": "abc", "max_tokens": 40, "stream": True}
        stream = pool.submit(httpx.post, running.url + COMPLETIONS, json=body, headers=headers, timeout=20)
        wait_until(lambda: metric(running, "recurra_state_slots_used") == 1)
        # A service manager signals the whole group: the engine must not mind.
        engine.send_signal(signal.SIGTERM)
        running.signal(signal.SIGTERM)
        wait_until(lambda: running.get("/health").json() == {"status": "stopping"})
        reply = httpx.post(running.url + COMPLETIONS, json=body, headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "shutting_down")
        found = events(stream.result().text)
        assert found[-1] == "[DONE]"
        assert "".join(c["text"] for e in found[:-1] for c in e["choices"]) == ("abc" * 20)[:40]
        assert running.end() == 0
        assert not engine.is_running()
        assert KEY not in running.log


def test_patience_ends_and_the_rest_is_told(tmp_path: Path) -> None:
    """And all that on a Unix socket, which is gone afterwards."""
    path = tmp_path / "socket"
    with fake_server({"uds": str(path), "shutdown_timeout": 0.2}, step_seconds=0.02) as running:
        wait_until(lambda: "the engine is ready" in running.log, 30)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=20) as client:
            body = {"prompt": "abc", "max_tokens": 900, "stream": True}
            with client.stream("POST", "http://recurra" + COMPLETIONS, json=body) as reply:
                lines = reply.iter_lines()
                first = next(lines)
                running.signal(signal.SIGINT)
                found = events("\n".join([first, *lines]))
        assert found[-1]["error"]["code"] == "shutting_down"
        assert running.end() == 0
    assert not path.exists()


def test_the_second_signal_ends_at_once() -> None:
    with fake_server(step_seconds=0.05) as running:
        running.wait_ready()
        engine = running.engine()
        body = {"prompt": "abc", "max_tokens": 900, "stream": True}
        with httpx.stream("POST", running.url + COMPLETIONS, json=body, timeout=20) as reply:
            lines = reply.iter_lines()
            next(lines)
            running.signal(signal.SIGINT)
            wait_until(lambda: "stopping" in running.log)
            started = time.monotonic()
            running.signal(signal.SIGINT)
            assert running.end() == 128 + signal.SIGINT
            assert "Traceback" not in running.log
        assert time.monotonic() - started < 3
        assert not engine.is_running()


def _abandoned(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.post(url + COMPLETIONS, json={"prompt": "abc"}, timeout=20)


def test_no_engine_outlives_its_server() -> None:
    with fake_server(step_seconds=60) as running:
        running.wait_ready()
        engine = running.engine()
        # Busy in a step that ends long after this test.
        threading.Thread(target=_abandoned, args=(running.url,), daemon=True).start()
        wait_until(lambda: metric(running, "recurra_prompt_tokens_total") == 3)
        running.signal(signal.SIGKILL)
        running.end()
        psutil.wait_procs([engine], timeout=5)
        assert not engine.is_running()


def test_a_setting_that_fails_in_the_engine_is_raised_here() -> None:
    with fake_server(fail="configuration") as running:
        assert running.end(30) == 2
        assert "ConfigError max_num_seqs=-1: negative. Use 1 or more." in running.log


def test_a_taken_port_is_told_before_anything_loads() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = pytest.raises(ConfigError, match=f"port={port}: Address already in use")
        with refused, listening_socket(ServerConfig(port=port)):
            pass


def test_an_unknown_host_is_told() -> None:
    refused = pytest.raises(ConfigError, match=r"host='no\.such\.host\.invalid'")
    with refused, listening_socket(ServerConfig(host="no.such.host.invalid")):
        pass


def test_a_socket_file_in_use_is_left_alone(tmp_path: Path) -> None:
    config = ServerConfig(uds=tmp_path / "s")
    with listening_socket(config):
        refused = pytest.raises(ConfigError, match="another server listens there")
        with refused, listening_socket(config):
            pass
        assert (tmp_path / "s").is_socket()
    assert not (tmp_path / "s").exists()
