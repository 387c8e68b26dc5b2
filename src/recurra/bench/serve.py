"""Measures a server over HTTP: sends requests at their times, whatever is still unanswered, and reads streams."""

from __future__ import annotations

import asyncio
import json
import time

import httpx

from recurra.bench.times import Timed
from recurra.bench.workload import Call


async def serve_calls(client: httpx.AsyncClient, model: str, calls: list[Call]) -> list[Timed]:
    """Send each call at its time to ``/v1/completions`` and note when its tokens come.

    Args:
        client: with the server's address as its base.
        model: the name that the server knows it by.
        calls: in the order of arrival.
    """
    begin = time.perf_counter()
    return await asyncio.gather(*(_call(client, model, call, begin) for call in calls))


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the model that the server serves."""
    answer = await client.get("/v1/models")
    answer.raise_for_status()
    return str(answer.json()["data"][0]["id"])


async def _call(client: httpx.AsyncClient, model: str, call: Call, begin: float) -> Timed:
    await asyncio.sleep(max(0.0, begin + call.at - time.perf_counter()))
    body = {
        "model": model, "prompt": call.prompt, "max_tokens": call.max_tokens, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    start = time.perf_counter()
    times: list[float] = []
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                text = (await answer.aread()).decode(errors="replace")
                return Timed(start, [], len(call.prompt), f"status {answer.status_code}: {text[:200]}")
            async for line in answer.aiter_lines():
                _read(line, times)
    except (httpx.HTTPError, ValueError) as error:
        return Timed(start, times, len(call.prompt), str(error) or type(error).__name__)
    return Timed(start, times, len(call.prompt), "" if times else "the answer has no tokens")


def _read(line: str, times: list[float]) -> None:
    """Enter one event. The count at the end says how many tokens came; until then an event counts as one."""
    if not line.startswith("data:") or line.endswith("[DONE]"):
        return
    event = json.loads(line.removeprefix("data:"))
    if "error" in event:
        raise ValueError(str(event["error"].get("message", event["error"])))
    usage = event.get("usage")
    if any(choice.get("text") or choice.get("token_ids") for choice in event.get("choices", ())):
        times.append(time.perf_counter())
    if usage and times:
        missing = usage["completion_tokens"] - len(times)
        times.extend([times[-1]] * missing)
