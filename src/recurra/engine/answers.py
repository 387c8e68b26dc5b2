"""One answer as it grows: its text, its log-probabilities, and when it ends."""

from __future__ import annotations

import dataclasses

from recurra.engine.detokenizer import Detokenizer
from recurra.engine.stops import find_stop, held_back
from recurra.engine.tokenizer import Tokenizer
from recurra.sampling_params import SamplingParams
from recurra.types import CompletionOutput, FinishReason, PositionLogprobs, Request


class GrowingOutput(CompletionOutput):
    """An answer under way: its lists are cut from the answer's own only if somebody looks at them.

    Copies for every step would cost the square of the answer's length.
    """

    __slots__ = ("_all_logprobs", "_all_tokens", "_count")

    def __init__(self, answer: Answer, text: str) -> None:
        self.index, self.text = answer.index, text
        self.cumulative_logprob = None if answer.logprobs is None else answer.cumulative_logprob
        self.finish_reason = self.stop_reason = self.error = None
        self._all_tokens, self._all_logprobs = answer.token_ids, answer.logprobs
        self._count = len(answer.token_ids)

    @property
    def token_ids(self) -> list[int]:  # type: ignore[override]
        return self._all_tokens[: self._count]

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:  # type: ignore[override]
        return None if self._all_logprobs is None else self._all_logprobs[: self._count]

    def tokens_after(self, count: int) -> list[int]:
        return self._all_tokens[count : self._count]

    def logprobs_after(self, count: int) -> list[PositionLogprobs] | None:
        return None if self._all_logprobs is None else self._all_logprobs[count : self._count]

    def __reduce__(self) -> tuple[type[CompletionOutput], tuple[object, ...]]:
        """Copies and pickles are plain outputs."""
        return CompletionOutput, tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class Answer:
    """Takes tokens, gives text, and says when to stop.

    A stop beats the length limit when one token meets both.

    Args:
        request: what is answered; ``params.max_tokens`` is a number here.
        index: which of its answers.
        end_ids: the model's end tokens.
        tokenizer: None: no text.
    """

    def __init__(
        self, request: Request, index: int, end_ids: frozenset[int], tokenizer: Tokenizer | None
    ) -> None:
        params = request.params
        assert params.max_tokens is not None
        self.index = index
        self.params: SamplingParams = params
        self.max_tokens: int = params.max_tokens
        self.stops: tuple[str, ...] = tuple(params.stop)
        self.end_ids = frozenset() if params.ignore_eos else end_ids
        self.stop_ids = frozenset(params.stop_token_ids)
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] | None = None if params.logprobs is None else []
        self.cumulative_logprob = 0.0
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(
                tokenizer, params.skip_special_tokens, list(request.prompt_token_ids)
            )
        self._searched = 0  # characters known to hold no stop string's end

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, token: int, logprobs: PositionLogprobs | None) -> None:
        """Take the next token."""
        assert not self.finished
        if self.max_tokens == 0:  # only the prompt was of interest
            self._end("length")
            return
        early = len(self.token_ids) < self.params.min_tokens
        self.token_ids.append(token)
        if self.logprobs is not None:
            assert logprobs is not None
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs[token].logprob
        is_end = token in self.end_ids
        if not early and (is_end or token in self.stop_ids):
            if self.params.include_stop_str_in_output:
                self._grow(token)
            self._end("stop", None if is_end else token)
            return
        self._grow(token)
        if not self.finished and len(self.token_ids) >= self.max_tokens:
            self._end("length")

    def abort(self) -> None:
        self._end("abort")

    def fail(self, error: str) -> None:
        self.error = error
        self._end("error")

    def output(self) -> CompletionOutput:
        """The answer so far; characters that may turn into a stop string are held back."""
        hold = self.stops and not self.finished and not self.params.include_stop_str_in_output
        text = self.text[: len(self.text) - held_back(self.text, self.stops)] if hold else self.text
        if not self.finished:
            return GrowingOutput(self, text)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.token_ids,
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def _grow(self, token: int) -> None:
        if self._detokenizer is not None:
            self.text += self._detokenizer.push(token)
            self._look_for_stop()

    def _look_for_stop(self) -> None:
        if not self.stops:
            return
        if len(self.token_ids) >= self.params.min_tokens:
            found = find_stop(self.text, self.stops, self._searched)
            if found is not None:
                keep = found.end if self.params.include_stop_str_in_output else found.start
                self.text = self.text[:keep]
                self.finish_reason, self.stop_reason = "stop", found.stop
        self._searched = len(self.text)

    def _end(self, reason: FinishReason, stop_reason: int | None = None) -> None:
        """Finish, with what the detokenizer still held; that tail may complete a stop string."""
        if self._detokenizer is not None:
            self.text += self._detokenizer.flush()
            if reason == "length":
                self._look_for_stop()
        if not self.finished:
            self.finish_reason, self.stop_reason = reason, stop_reason
