"""An engine without a model: the same interface as LLMEngine, answers that a test can foresee.

Answer ``k`` of a prompt repeats the prompt's tokens round and round, beginning with the ``k``-th. Prompts
that begin with ``!`` ask for accidents (see ``_ACCIDENTS``). Tokens are bytes, so most characters
beyond ASCII span tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from recurra.engine.answers import Answer
from recurra.engine.chat import ChatTemplate
from recurra.engine.prompts import make_request
from recurra.engine.tokenizer import Tokenizer
from recurra.errors import CheckpointError, ConfigError, QueueFullError
from recurra.sampling_params import SamplingParams
from recurra.types import Logprob, PositionLogprobs, Request, RequestOutput

VOCABULARY = 258
BOS, EOS = 256, 257
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {{ mood|default('') }}{% endif %}"
)


def byte_tokenizer(chat: bool = True) -> Tokenizer:
    """A token a byte, plus BOS and EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = FastTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    template = ChatTemplate({"default": TEMPLATE}, names, "the fake") if chat else None
    return Tokenizer(backend, names, BOS, frozenset({EOS}), template)


@dataclass(frozen=True)
class FakeConfig:
    """What LLMEngine's settings have, and how the fake misbehaves."""

    model: str = "fake"
    max_queue_len: int | None = None
    max_num_seqs: int = 4
    max_model_len: int = 1000
    step_seconds: float = 0.0
    fail: str = ""
    sampling_defaults: dict[str, Any] = field(default_factory=dict)

    def model_copy(self, update: dict[str, Any]) -> FakeConfig:
        return FakeConfig(**{**self.__dict__, **update})


@dataclass
class FakeStats:
    running: int
    waiting: int
    free_slots: int
    used_slots: int
    finished: dict[str, int] = field(default_factory=dict)


@dataclass
class _Page:
    request: Request
    answers: list[Answer]
    prompt_logprobs: list[PositionLogprobs | None] | None


class AccidentError(Exception):
    """What breaks on purpose."""


def _crash(page: _Page) -> None:
    raise AccidentError("the step failed")


def _not_finite(page: _Page) -> None:
    answer = page.answers[0]
    if len(answer.token_ids) >= 2:
        answer.fail("the state is not finite")


_ACCIDENTS: dict[str, Callable[[_Page], None]] = {"!crash": _crash, "!nan": _not_finite}


class FakeEngine:
    """See the module."""

    def __init__(self, config: FakeConfig) -> None:
        self.config = config
        self.max_model_len = config.max_model_len
        self.model_config = SimpleNamespace(vocab_size=VOCABULARY, architecture="FakeForCausalLM")
        self.sampling_defaults = config.sampling_defaults
        self.tokenizer = byte_tokenizer()
        self._waiting: deque[_Page] = deque()
        self._running: dict[str, _Page] = {}

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams, priority: int = 0) -> None:
        limit = self.config.max_queue_len
        if limit is not None and len(self._waiting) >= limit:
            raise QueueFullError(limit)
        request = make_request(
            request_id,
            prompt,
            params,
            priority,
            tokenizer=self.tokenizer,
            vocab_size=VOCABULARY,
            max_model_len=self.max_model_len,
        )
        if self.tokenizer.decode(request.prompt_token_ids).startswith("!bug"):
            raise AccidentError("a bug while queueing")
        answers = [Answer(request, i, frozenset({EOS}), self.tokenizer) for i in range(params.n)]
        self._waiting.append(_Page(request, answers, self._scores(request)))

    def abort_request(self, request_ids: Iterable[str]) -> None:
        ids = set(request_ids)
        self._waiting = deque(p for p in self._waiting if p.request.request_id not in ids)
        for request_id in ids:
            self._running.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def step(self) -> list[RequestOutput]:
        time.sleep(self.config.step_seconds)
        while self._waiting and len(self._running) < self.config.max_num_seqs:
            page = self._waiting.popleft()
            self._running[page.request.request_id] = page
        outputs = [self._advance(page) for page in list(self._running.values())]
        for output in outputs:
            if output.finished:
                del self._running[output.request_id]
        return outputs

    def stats(self) -> FakeStats:
        used = len(self._running)
        return FakeStats(used, len(self._waiting), self.config.max_num_seqs - used, used)

    def warm_up(self, progress: Callable[[str, int, int], None]) -> None:
        progress("warm-up", 1, 1)

    def _advance(self, page: _Page) -> RequestOutput:
        text = self.tokenizer.decode(page.request.prompt_token_ids)
        for mark, accident in _ACCIDENTS.items():
            if text.startswith(mark):
                accident(page)
        ids = page.request.prompt_token_ids
        for answer in page.answers:
            if not answer.finished:
                token = ids[(len(answer.token_ids) + answer.index) % len(ids)]
                answer.push(token, self._candidates(token, answer.params.logprobs))
        return RequestOutput(
            page.request.request_id,
            None,
            list(ids),
            page.prompt_logprobs,
            [answer.output() for answer in page.answers],
            all(answer.finished for answer in page.answers),
            num_cached_tokens=1,
        )

    def _scores(self, request: Request) -> list[PositionLogprobs | None] | None:
        wanted = request.params.prompt_logprobs
        if wanted is None:
            return None
        return [None, *(self._candidates(token, wanted) for token in request.prompt_token_ids[1:])]

    def _candidates(self, token: int, wanted: int | None) -> PositionLogprobs:
        """The token itself is the second likeliest of all."""
        own = {token: Logprob(-1.0 - token / 1000, 2)}
        others = [(token + 1 + i) % VOCABULARY for i in range(wanted or 0)]
        ranks = [1, *range(3, 200)]
        return own | {
            t: Logprob(-0.4 * r, r) for t, r in zip(others, ranks, strict=False) if r <= (wanted or 0)
        }


def build_fake(config: FakeConfig, progress: Callable[[str, int, int], None]) -> FakeEngine:
    """The worker's factory."""
    progress("loading weights", 1, 2)
    if config.fail == "configuration":
        raise ConfigError("max_num_seqs", -1, "negative.", "Use 1 or more.")
    if config.fail == "checkpoint":
        raise CheckpointError("no weights here")
    if config.fail == "memory":
        raise MemoryError("out of memory")
    engine = FakeEngine(config)
    engine.warm_up(progress)
    return engine
