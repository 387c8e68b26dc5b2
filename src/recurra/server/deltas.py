"""Turns the engine's answers-so-far into what is new since the last step."""

from __future__ import annotations

from dataclasses import dataclass, field

from recurra.server.messages import AnswerDelta, PositionList, RequestDelta, TokenLogprob
from recurra.types import CompletionOutput, PositionLogprobs, RequestOutput


@dataclass(slots=True)
class _Answer:
    """How much of one answer the server has."""

    characters: int = 0
    tokens: int = 0
    finished: bool = False


@dataclass(slots=True)
class _Request:
    """What the server has of a request."""

    answers: dict[int, _Answer] = field(default_factory=dict)
    prompt_logprobs: bool = False


@dataclass(slots=True)
class DeltaTracker:
    """Remembers, for every request in flight, what was sent already."""

    _sent: dict[str, _Request] = field(default_factory=dict)

    def start(self, request_id: str) -> None:
        """Follow a request from its first token."""
        self._sent[request_id] = _Request()

    def forget(self, request_id: str) -> None:
        """Stop following an aborted request; unknown ids are ignored."""
        self._sent.pop(request_id, None)

    def delta(self, output: RequestOutput) -> RequestDelta | None:
        """What is new in ``output``, or None when that is nothing or nobody follows it."""
        sent = self._sent.get(output.request_id)
        if sent is None:
            return None
        news = [
            delta
            for answer in output.outputs
            if (delta := _answer_delta(answer, sent.answers.setdefault(answer.index, _Answer()))) is not None
        ]
        if output.finished:
            self.forget(output.request_id)
        elif not news:
            return None
        # The prompt is whole once an answer has begun, and is told once.
        prompt = None if sent.prompt_logprobs else _prompt_logprobs(output)
        sent.prompt_logprobs = True
        return RequestDelta(output.request_id, news, output.finished, output.num_cached_tokens, prompt)


def _answer_delta(answer: CompletionOutput, sent: _Answer) -> AnswerDelta | None:
    if sent.finished:
        return None
    text = answer.text[sent.characters :]
    token_ids = answer.tokens_after(sent.tokens)
    if not text and not token_ids and answer.finish_reason is None:
        return None
    logprobs = answer.logprobs_after(sent.tokens)
    delta = AnswerDelta(
        answer.index,
        text,
        token_ids,
        None if logprobs is None else [candidates(entry) for entry in logprobs],
        answer.finish_reason,
        answer.stop_reason,
        answer.error,
    )
    sent.characters += len(text)
    sent.tokens += len(token_ids)
    sent.finished = answer.finish_reason is not None
    return delta


def _prompt_logprobs(output: RequestOutput) -> list[PositionList | None] | None:
    if output.prompt_logprobs is None:
        return None
    return [None if entry is None else candidates(entry) for entry in output.prompt_logprobs]


def candidates(entry: PositionLogprobs) -> PositionList:
    """One position's candidates in wire form."""
    return [TokenLogprob(token, lp.logprob, lp.rank) for token, lp in entry.items()]
