"""Answers ``/v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from recurra.errors import RequestError
from recurra.server.answers import Offsets, TokenNames, Totals, check_answer, collect, finite, pieces
from recurra.server.client import Call, CallDelta, Prompt
from recurra.server.messages import AnswerDelta, EngineInfo, PositionList
from recurra.server.prompts import answer_limit, check_ids, text_ids
from recurra.server.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from recurra.server.sse import DONE, event

if TYPE_CHECKING:
    from recurra.engine.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Source:
    """One prompt: its tokens, and its text where that is to be echoed."""

    token_ids: list[int]
    text: str


async def sources(
    body: CompletionRequest, tokenizer: Tokenizer | None, info: EngineInfo, max_prompts: int
) -> list[Source]:
    """The prompts of a body, tokenised and checked.

    Raises:
        RequestError: 400, what is wrong with which prompt.
    """
    if info.max_queue_len is not None:  # a call is queued whole or not at all
        max_prompts = min(max_prompts, info.max_queue_len)
    if len(body.prompt) > max_prompts:
        raise RequestError(
            f"prompt: {len(body.prompt)} prompts, at most {max_prompts} in one call", param="prompt"
        )
    found = []
    for given in body.prompt:
        ids = given if isinstance(given, list) else await text_ids(
            tokenizer, given, body.add_special_tokens is not False, "prompt"
        )  # fmt: skip
        check_ids(ids, info, "prompt")
        found.append(Source(ids, _echo_text(body, given, tokenizer)))
    return found


def _echo_text(body: CompletionRequest, given: str | list[int], tokenizer: Tokenizer | None) -> str:
    if not body.echo:
        return ""
    if isinstance(given, str):
        return given
    return "" if tokenizer is None else tokenizer.decode(given, body.skip_special_tokens is not False)


def engine_prompts(
    body: CompletionRequest, found: Sequence[Source], info: EngineInfo, has_tokenizer: bool
) -> list[Prompt]:
    """What the engine is asked to do for a body.

    Raises:
        RequestError: 400, naming the field.
    """
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError("best_of is not supported beyond n", param="best_of", code="unsupported_field")
    default = int(info.sampling_defaults.get("max_tokens", DEFAULT_MAX_TOKENS))
    prompts = []
    for source in found:
        limit = answer_limit(len(source.token_ids), info, body.max_tokens, default, "max_tokens")
        params = body.sampling_params(
            info.vocab_size,
            has_tokenizer,
            info.sampling_defaults,
            max_tokens=limit,
            logprobs=body.logprobs,
            prompt_logprobs=_prompt_logprobs(body),
        )
        prompts.append(Prompt(source.token_ids, params, body.priority or 0, body.cache_salt))
    return prompts


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """echo with logprobs scores the prompt too, as evaluation harnesses ask."""
    echoed = body.logprobs if body.echo else None
    wanted = [count for count in (echoed, body.prompt_logprobs) if count is not None]
    return max(wanted, default=None)


@dataclass(slots=True)
class _Place:
    """Where one choice stands: whether it began, and the offsets of its next token."""

    offsets: Offsets
    begun: bool = False


@dataclass(slots=True)
class CompletionWriter:
    """Writes the choices of one call, whole or in pieces: the same code, so that both say the same."""

    body: CompletionRequest
    sources: Sequence[Source]
    tokenizer: Tokenizer | None
    response_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    _places: dict[tuple[int, int], _Place] = field(default_factory=dict)
    _prompt_logprobs: dict[int, list[PositionList | None]] = field(default_factory=dict)

    @property
    def totals(self) -> Totals:
        """Fresh counters for the call."""
        return Totals(prompt=sum(len(source.token_ids) for source in self.sources))

    async def whole(self, call: Call, totals: Totals) -> CompletionResponse:
        """Wait for all answers and write them."""
        choices: list[CompletionChoice] = []
        for number, result in enumerate(await collect(call, totals)):
            self._learn(number, result.prompt_logprobs)
            answers = sorted(result.answers.values(), key=lambda answer: answer.index)
            choices.extend(self.choice(number, answer) for answer in answers)
        return self._response(choices) | {"usage": totals.usage()}

    async def events(self, call: Call, totals: Totals) -> AsyncIterator[bytes]:
        """The stream: an event a piece, then the usage if wanted, then the end mark."""
        async for data in pieces(call, lambda item, out: self._write(item, out, totals)):
            yield data
        if self.body.include_usage:
            yield event(self._response([]) | {"usage": totals.usage()})
        yield DONE

    def _write(self, item: CallDelta, out: list[bytes], totals: Totals) -> None:
        totals.add(item.delta)
        self._learn(item.prompt, item.delta.prompt_logprobs)
        for answer in item.delta.answers:
            check_answer(answer)
            if self._says_something(item.prompt, answer):
                response = self._response([self.choice(item.prompt, answer)])
                if self.body.include_usage:
                    response["usage"] = totals.usage() if self.body.continuous_usage else None
                out.append(event(response))

    def _says_something(self, number: int, answer: AnswerDelta) -> bool:
        """Tokens whose text is held back (part of a character, perhaps a stop string) say nothing yet."""
        if answer.text or answer.finish_reason is not None or answer.logprobs:
            return True
        begins = self.body.echo and (number, answer.index) not in self._places
        return bool(begins or self.body.return_token_ids)

    def _learn(self, number: int, prompt_logprobs: list[PositionList | None] | None) -> None:
        if prompt_logprobs is not None:
            self._prompt_logprobs[number] = prompt_logprobs

    def _response(self, choices: list[CompletionChoice]) -> CompletionResponse:
        return {
            "id": self.response_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }

    def choice(self, number: int, answer: AnswerDelta) -> CompletionChoice:
        """A piece of an answer; the first one begins with the prompt if that is echoed."""
        source = self.sources[number]
        place = self._places.get((number, answer.index))
        if place is None:
            place = self._places[number, answer.index] = _Place(self._answer_offsets(source))
        echo = bool(self.body.echo) and not place.begun
        choice: CompletionChoice = {
            "index": number * (self.body.n or 1) + answer.index,
            "text": source.text + answer.text if echo else answer.text,
            "logprobs": self._logprobs(number, answer, place, echo),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.token_ids
            if not place.begun:
                choice["prompt_token_ids"] = source.token_ids
        if self.body.prompt_logprobs is not None:
            names = self._names
            choice["prompt_logprobs"] = [names.candidates(c) for c in self._prompt_logprobs.get(number, [])]
        place.begun = True
        return choice

    @property
    def _names(self) -> TokenNames:
        return TokenNames(self.tokenizer, bool(self.body.return_tokens_as_token_ids))

    def _answer_offsets(self, source: Source) -> Offsets:
        skip = self.body.skip_special_tokens is not False
        tokenizer = self.tokenizer if self.body.logprobs is not None else None
        return Offsets(tokenizer, skip, len(source.text), source.token_ids)

    def _logprobs(
        self, number: int, answer: AnswerDelta, place: _Place, echo: bool
    ) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        lists: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if echo:
            skip = self.body.skip_special_tokens is not False
            entries = self._prompt_logprobs.get(number, [])
            ids = self.sources[number].token_ids
            self._append(lists, ids, entries, Offsets(self.tokenizer, skip, 0))
        self._append(lists, answer.token_ids, answer.logprobs or [], place.offsets)
        return lists

    def _append(
        self,
        lists: CompletionLogprobs,
        ids: Sequence[int],
        entries: Sequence[PositionList | None],
        offsets: Offsets,
    ) -> None:
        names = self._names
        for token_id, entry in zip(ids, entries, strict=True):
            lists["tokens"].append(names.name(token_id))
            lists["text_offset"].append(offsets.push(token_id))
            lists["token_logprobs"].append(_own(token_id, entry))
            lists["top_logprobs"].append(self._top(entry, names))

    def _top(self, entry: PositionList | None, names: TokenNames) -> dict[str, float] | None:
        if entry is None or not self.body.logprobs:
            return None
        top: dict[str, float] = {}
        for candidate in entry:
            # Different tokens can look alike (parts of characters): the likeliest one is meant.
            name, logprob = names.name(candidate.token_id), finite(candidate.logprob)
            top[name] = max(top.get(name, logprob), logprob)
        return top


def _own(token_id: int, entry: PositionList | None) -> float | None:
    if entry is None:
        return None
    return next((finite(c.logprob) for c in entry if c.token_id == token_id), None)
