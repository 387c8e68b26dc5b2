"""The routes: each checks, hands over to the module that answers, and returns."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from recurra import __version__
from recurra.server import chat, completions
from recurra.server.answers import TokenNames, Totals
from recurra.server.client import Call, Prompt
from recurra.server.context import context_of
from recurra.server.prompts import chat_ids, check_ids, need_tokenizer, text_ids
from recurra.server.protocol.base import Body, Streamed
from recurra.server.protocol.chat import ChatRequest, ChatResponse
from recurra.server.protocol.completions import CompletionRequest, CompletionResponse
from recurra.server.protocol.models import ModelCard, ModelList
from recurra.server.protocol.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from recurra.server.sse import EventStream, while_connected
from recurra.server.state import ServerState, State

router = APIRouter()

B = TypeVar("B", bound=Body)


class Writer(Protocol):
    """Writes one call's answers."""

    @property
    def totals(self) -> Totals:
        """Fresh counters."""
        ...

    async def whole(self, call: Call, totals: Totals) -> Any:
        """All answers at once."""
        ...

    def events(self, call: Call, totals: Totals) -> Any:
        """An async generator of encoded events."""
        ...


@router.get("/health")
async def health(state: State) -> Response:
    """200 once the engine is warm; 503 before, while it restarts, and while the server stops."""
    progress = state.supervisor.progress
    body: dict[str, Any] = {"status": state.status}
    if progress is not None:
        body["progress"] = {"stage": progress.stage, "done": progress.done, "total": progress.total}
    return JSONResponse(body, 200 if state.status == "ok" else 503)


@router.get("/version")
async def version() -> dict[str, str]:
    """Version of Recurra."""
    return {"version": __version__}


@router.get("/metrics")
async def metrics(state: State) -> Response:
    """Prometheus' exposition format."""
    return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.get("/v1/models", response_model=ModelList)
async def models(state: State) -> Response:
    """All served names."""
    return json_response({"object": "list", "data": [_card(state, name) for name in state.names]})


@router.get("/v1/models/{model_id:path}", response_model=ModelCard)
async def model(model_id: str, state: State) -> Response:
    """One served name, or 404."""
    return json_response(_card(state, state.model_name(model_id)))


@router.post("/v1/completions", response_model=CompletionResponse)
async def complete(body: CompletionRequest, state: State, request: Request) -> Response:
    """Continue one or more prompts."""
    name = check_body(body, state)
    info, tokenizer = state.info, state.tokenizer
    found = await completions.sources(body, tokenizer, info, state.config.max_prompts_per_call)
    prompts = completions.engine_prompts(body, found, info, tokenizer is not None)
    response_id = f"cmpl-{context_of(request.scope).request_id}"
    writer = completions.CompletionWriter(body, found, tokenizer, response_id, name)
    return await answer_call(body, prompts, writer, state, request)


@router.post("/v1/chat/completions", response_model=ChatResponse)
async def chat_complete(body: ChatRequest, state: State, request: Request) -> Response:
    """Continue a conversation."""
    name = check_body(body, state)
    info, tokenizer = state.info, state.tokenizer
    ids = await chat_ids(tokenizer, body)
    check_ids(ids, info, "messages")
    prompt = chat.engine_prompt(body, ids, info, state.config.default_chat_max_tokens)
    response_id = f"chatcmpl-{context_of(request.scope).request_id}"
    writer = chat.ChatWriter(body, ids, tokenizer, response_id, name)
    return await answer_call(body, [prompt], writer, state, request)


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, state: State) -> Response:
    """Token ids of a text or a conversation."""
    check_body(body, state)
    if body.prompt is None:
        ids = await chat_ids(state.tokenizer, body)
    else:
        ids = await text_ids(state.tokenizer, body.prompt, body.add_special_tokens is not False, "prompt")
    names = TokenNames(state.tokenizer)
    strings = [names.name(token_id) for token_id in ids] if body.return_token_strs else None
    limit = state.facts.max_model_len
    return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, state: State) -> Response:
    """Text of token ids, special tokens included."""
    check_body(body, state)
    tokenizer = need_tokenizer(state.tokenizer, "tokens")
    if body.tokens:
        check_ids(body.tokens, state.facts, "tokens")
    return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def json_response(data: Any) -> Response:
    """A reply."""
    return Response(msgspec.json.encode(data), media_type="application/json")


def _card(state: ServerState, name: str) -> ModelCard:
    info = state.supervisor.info
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "recurra",
        "max_model_len": None if info is None else info.max_model_len,
    }


def check_body(body: Body, state: ServerState) -> str:
    """Refuse what no engine is needed for; returns the served name."""
    body.check_extra(ignore_unknown=state.config.unknown_fields == "ignore")
    if isinstance(body, Streamed):
        body.check_stream()
    return state.model_name(body.model)


async def answer_call(
    body: Streamed, prompts: Sequence[Prompt], writer: Writer, state: ServerState, request: Request
) -> Response:
    """Run a call, whole or as a stream; a client that goes away aborts it."""
    context = context_of(request.scope)
    totals = writer.totals
    call = state.supervisor.client.call(context.request_id, prompts)

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            async with call:
                yield b""  # accepted: the status can be sent
                async for data in writer.events(call, totals):
                    yield data
        finally:
            context.fields |= totals.log_fields()

    async def whole() -> Any:
        try:
            async with call:
                return await writer.whole(call, totals)
        finally:
            context.fields |= totals.log_fields()

    if body.stream:

        def on_error(error: Exception) -> Any:
            return state.report(error, context)

        return EventStream(events(), on_error, lambda: context.fields.update(client_gone=True))
    return json_response(await while_connected(whole(), request.receive))
