"""Answers in progress: merging what is new, counting tokens, naming tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recurra.engine.detokenizer import Detokenizer
from recurra.server.client import Call, CallDelta
from recurra.server.errors import AnswerError
from recurra.server.messages import AnswerDelta, PositionList, RequestDelta
from recurra.server.protocol.usage import Usage, usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from recurra.engine.tokenizer import Tokenizer

#: JSON has no minus infinity.
LOWEST_LOGPROB = -9999.0


def check_answer(delta: AnswerDelta) -> None:
    """Raise for an answer that failed.

    Raises:
        AnswerError: with the engine's reason.
    """
    if delta.finish_reason == "error":
        raise AnswerError(delta.error or "the answer failed")
    if delta.finish_reason == "abort":
        raise AnswerError("the engine ended this answer early")


@dataclass(slots=True)
class Totals:
    """Tokens of one call."""

    prompt: int
    completion: int = 0
    cached: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    _prompts_seen: set[str] = field(default_factory=set)

    def add(self, delta: RequestDelta) -> None:
        """Count a delta."""
        if delta.request_id not in self._prompts_seen:
            self._prompts_seen.add(delta.request_id)
            self.cached += delta.num_cached_tokens
        for answer in delta.answers:
            self.completion += len(answer.token_ids)
            if answer.finish_reason is not None:
                self.finish_reasons.append(answer.finish_reason)

    def usage(self) -> Usage:
        """OpenAI's usage object."""
        return usage(self.prompt, self.completion, self.cached)

    def log_fields(self) -> dict[str, Any]:
        """For the log line of the call."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "cached_tokens": self.cached,
            "finish": ",".join(self.finish_reasons),
        }


@dataclass(slots=True)
class Whole:
    """One prompt's answers, complete."""

    answers: dict[int, AnswerDelta] = field(default_factory=dict)
    prompt_logprobs: list[PositionList | None] | None = None


@dataclass(slots=True)
class _Parts:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionList] = field(default_factory=list)

    def add(self, delta: AnswerDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs or ())

    def whole(self, last: AnswerDelta) -> AnswerDelta:
        logprobs = None if last.logprobs is None else self.logprobs
        return AnswerDelta(
            last.index, "".join(self.texts), self.token_ids, logprobs, last.finish_reason, last.stop_reason
        )


async def collect(call: Call, totals: Totals) -> list[Whole]:
    """Wait for all answers of a call.

    Raises:
        AnswerError: one of them failed.
    """
    wholes = [Whole() for _ in call.prompts]
    parts: dict[tuple[int, int], _Parts] = {}
    async for news in call:
        for item in news:
            totals.add(item.delta)
            whole = wholes[item.prompt]
            whole.prompt_logprobs = whole.prompt_logprobs or item.delta.prompt_logprobs
            for answer in item.delta.answers:
                check_answer(answer)
                piece = parts.setdefault((item.prompt, answer.index), _Parts())
                piece.add(answer)
                if answer.finish_reason is not None:
                    whole.answers[answer.index] = piece.whole(answer)
    return wholes


async def pieces(call: Call, write: Callable[[CallDelta, list[bytes]], None]) -> AsyncIterator[bytes]:
    """What ``write`` makes of a call's news, joined to one piece a turn.

    Raises:
        AnswerError: an answer failed; what was written before it has been yielded.
    """
    async for news in call:
        out: list[bytes] = []
        try:
            for item in news:
                write(item, out)
        except AnswerError:
            yield b"".join(out)
            raise
        if out:
            yield b"".join(out)


@dataclass(frozen=True, slots=True)
class TokenNames:
    """What tokens are called in log-probabilities.

    Args:
        tokenizer: None where the server has none.
        as_ids: ``token_id:17`` instead of text, which is unique.
    """

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def name(self, token_id: int) -> str:
        """The token as text, or as its id."""
        if self.tokenizer is None or self.as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_to_string(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        """The token's own bytes, which may be part of a character."""
        return None if self.tokenizer is None else list(self.tokenizer.token_to_bytes(token_id))

    def candidates(self, entry: PositionList | None) -> dict[str, Any] | None:
        """vLLM's form of a prompt position: token id to what is known of it."""
        if entry is None:
            return None
        return {
            str(c.token_id): {
                "logprob": finite(c.logprob),
                "rank": c.rank,
                "decoded_token": self.name(c.token_id),
            }
            for c in entry
        }


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return max(logprob, LOWEST_LOGPROB)


class Offsets:
    """Where each token's text begins, counted in characters.

    Args:
        tokenizer: None: every offset is ``start``.
        start: characters before the first token.
        prompt_ids: tokens before the first token, for its leading space.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        skip_special_tokens: bool,
        start: int,
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._stream = None if tokenizer is None else Detokenizer(tokenizer, skip_special_tokens, prompt_ids)
        self._offset = start

    def push(self, token_id: int) -> int:
        """The next token's offset."""
        offset = self._offset
        if self._stream is not None:
            self._offset += len(self._stream.push(token_id))
        return offset
