"""Tokens become RequestOutputs: a book of the requests that are under way."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from recurra.engine.answers import Answer
from recurra.engine.runner import StepResult
from recurra.engine.tokenizer import Tokenizer
from recurra.types import PositionLogprobs, Request, RequestMetrics, RequestOutput, Sequence


@dataclass(slots=True)
class _Page:
    """A request and its answers."""

    request: Request
    answers: list[Answer]
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    metrics: RequestMetrics
    finished: bool = field(default=False)
    num_cached_tokens: int = 0

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.request.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self.prompt_logprobs,
            outputs=[answer.output() for answer in self.answers],
            finished=self.finished,
            num_cached_tokens=self.num_cached_tokens,
            metrics=self.metrics,
        )


class OutputBook:
    """Follows every request to its one final output.

    Args:
        end_ids: the model's end tokens.
        tokenizer: None: token ids only.
    """

    def __init__(self, end_ids: frozenset[int], tokenizer: Tokenizer | None) -> None:
        self._end_ids = end_ids
        self._tokenizer = tokenizer
        self._pages: dict[str, _Page] = {}
        self._news: dict[str, _Page] = {}  # pages that changed since the last drain
        self.generated_tokens = 0
        self.finish_reasons: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Requests whose final output was not collected yet."""
        return len(self._pages) + sum(page.finished for page in self._news.values())

    def open(self, request: Request) -> None:
        """Begin to follow a request."""
        answers = [
            Answer(request, index, self._end_ids, self._tokenizer) for index in range(request.params.n)
        ]
        asked = request.params.prompt_logprobs is not None
        self._pages[request.request_id] = _Page(
            request,
            answers,
            list(request.prompt_token_ids),
            [None] if asked else None,
            RequestMetrics(request.arrival_time),
        )

    def scheduled(self, request_id: str) -> None:
        """The request's first step begins."""
        metrics = self._pages[request_id].metrics
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()

    def cached(self, request_id: str, tokens: int) -> None:
        """So many of its prompt's tokens needed no computing."""
        self._pages[request_id].num_cached_tokens = tokens

    def update(self, result: StepResult) -> list[Sequence]:
        """Enter a step's tokens; returns the sequences that end with it."""
        now = time.monotonic()
        ended = []
        for request_id, scores in result.prompt_logprobs.items():
            entries = self._pages[request_id].prompt_logprobs
            assert entries is not None
            entries.extend(scores)
        for sequence, token in result.tokens.items():
            page, answer = self._find(sequence)
            before = len(answer.token_ids)
            answer.push(token, result.logprobs.get(sequence))
            self.generated_tokens += len(answer.token_ids) - before
            if page.metrics.first_token_time is None:
                page.metrics.first_token_time = now
            self._note(page, answer, now)
            if answer.finished:
                ended.append(sequence)
        for sequence, error in result.failed.items():
            page, answer = self._find(sequence)
            answer.fail(error)
            self._note(page, answer, now)
            ended.append(sequence)
        return ended

    def abort(self, request_id: str) -> None:
        """End what is unfinished of a request; its final output comes with the next drain."""
        page = self._pages[request_id]
        for answer in page.answers:
            if not answer.finished:
                answer.abort()
                self._note(page, answer, time.monotonic())

    def reset_counts(self) -> None:
        """Start the counters anew."""
        self.generated_tokens = 0
        self.finish_reasons.clear()

    def drain(self) -> list[RequestOutput]:
        """The outputs that changed since the last call; each finished request is in one of them."""
        outputs = [page.output() for page in self._news.values()]
        self._news.clear()
        return outputs

    def _find(self, sequence: Sequence) -> tuple[_Page, Answer]:
        page = self._pages[sequence.request.request_id]
        return page, page.answers[sequence.index]

    def _note(self, page: _Page, answer: Answer, now: float) -> None:
        request_id = page.request.request_id
        self._news[request_id] = page
        if not answer.finished:
            return
        assert answer.finish_reason is not None
        self.finish_reasons[answer.finish_reason] += 1
        if all(a.finished for a in page.answers):
            page.finished = True
            page.metrics.finished_time = now
            del self._pages[request_id]
