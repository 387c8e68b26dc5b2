"""The routes of ``/v1/responses``."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from recurra.errors import RequestError
from recurra.server import responses
from recurra.server.prompts import check_ids, need_tokenizer
from recurra.server.protocol.responses import ResponseRequest
from recurra.server.routes import answer_call, check_body, json_response
from recurra.server.state import ServerState, State
from recurra.server.stored import Stored

router = APIRouter()


@router.post("/v1/responses")
async def create(body: ResponseRequest, state: State, request: Request) -> Response:
    """Answer a turn; ``previous_response_id`` names what it goes on from."""
    name = check_body(body, state)
    body.check_supported()
    owner = responses.owner_of(request.headers.get("authorization"))
    info, tokenizer = state.info, need_tokenizer(state.tokenizer, "input")
    before = None
    if body.previous_response_id is not None:
        before = _find(state, owner, body.previous_response_id, "previous_response_id")
    turn = responses.make_turn(body, before, tokenizer)
    check_ids(turn.token_ids, info, "input")
    prompt = responses.engine_prompt(body, turn, info, state.config.default_chat_max_tokens)
    response_id = f"resp_{uuid.uuid4().hex}"  # never a caller's choice: ids are keys
    writer = responses.ResponseWriter(
        body, turn, response_id, name, lambda stored: state.responses.put(owner, stored)
    )
    return await answer_call(body, [prompt], writer, state, request)


@router.get("/v1/responses/{response_id}")
async def retrieve(response_id: str, state: State, request: Request) -> Response:
    """A stored response."""
    owner = responses.owner_of(request.headers.get("authorization"))
    return json_response(_find(state, owner, response_id, "response_id").body)


@router.delete("/v1/responses/{response_id}")
async def delete(response_id: str, state: State, request: Request) -> Response:
    """Forget a stored response."""
    owner = responses.owner_of(request.headers.get("authorization"))
    if not state.responses.delete(owner, response_id):
        raise _missing(response_id, "response_id")
    return json_response({"id": response_id, "object": "response", "deleted": True})


def _find(state: ServerState, owner: str, response_id: str, param: str) -> Stored:
    stored = state.responses.get(owner, response_id)
    if stored is None:
        raise _missing(response_id, param)
    return stored


def _missing(response_id: str, param: str) -> RequestError:
    return RequestError(
        f"there is no response {response_id!r:.100}: it was never stored, was deleted, or is too old",
        param=param, status=404, code="response_not_found",
    )  # fmt: skip
