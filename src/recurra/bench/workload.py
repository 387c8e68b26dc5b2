"""What is asked, and when: prompts as token ids, lengths of answers, times of arrival."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

from recurra.bench.traces import FIRST_ID, LAST_ID

Mix = Literal["fixed", "chat"]

#: Median and spread (of the logarithm) of prompts and answers in the "chat" mix: lengths as people's talks with
#: assistants have them, many short and a few very long.
_CHAT_PROMPT, _CHAT_ANSWER = (120, 1.1), (200, 0.8)
_CHAT_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        at: seconds after the start.
        prompt: token ids.
        max_tokens: of the answer.
    """

    at: float
    prompt: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """How requests are drawn; the same seed draws the same ones.

    Attributes:
        count: of requests.
        mix: "fixed": every request has ``input_len`` and ``output_len`` tokens; "chat": lengths vary widely.
        input_len, output_len: tokens, of the fixed mix.
        shared_prefix: tokens that all prompts begin with, in front of their own.
        rate: requests a second; infinity: all at once.
        poisson: gaps between arrivals are drawn from an exponential distribution, else all are equal.
        vocab_size: of the model.
        seed: of all draws.
    """

    count: int
    mix: Mix = "fixed"
    input_len: int = 128
    output_len: int = 128
    shared_prefix: int = 0
    rate: float = math.inf
    poisson: bool = True
    vocab_size: int = LAST_ID + 1
    seed: int = 0

    def calls(self) -> list[Call]:
        """The requests in the order of arrival."""
        draw = random.Random(self.seed)
        prefix = self._tokens(draw, self.shared_prefix)
        found, now = [], 0.0
        for _ in range(self.count):
            length, answer = self._lengths(draw)
            found.append(Call(now, prefix + self._tokens(draw, length), answer))
            now += self._gap(draw)
        return found

    def _lengths(self, draw: random.Random) -> tuple[int, int]:
        if self.mix == "fixed":
            return self.input_len, self.output_len
        return _long_tailed(draw, *_CHAT_PROMPT), _long_tailed(draw, *_CHAT_ANSWER)

    def _gap(self, draw: random.Random) -> float:
        if math.isinf(self.rate):
            return 0.0
        return draw.expovariate(self.rate) if self.poisson else 1.0 / self.rate

    def _tokens(self, draw: random.Random, count: int) -> list[int]:
        last = min(LAST_ID, self.vocab_size - 1)
        return [draw.randint(min(FIRST_ID, last), last) for _ in range(count)]


def _long_tailed(draw: random.Random, median: float, spread: float) -> int:
    return max(1, min(_CHAT_LONGEST, round(median * math.exp(draw.gauss(0.0, spread)))))
