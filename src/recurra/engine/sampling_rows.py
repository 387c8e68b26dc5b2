"""Host side of sampling: what each row asks for, kept from step to step.

Nothing here loops over the vocabulary: penalties, biases and bans are lists of single entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurra.engine.rows import Filters
from recurra.engine.seeds import answer_seed
from recurra.engine.transfer import column
from recurra.sampling_params import SamplingParams
from recurra.types import Sequence

#: Encodes a bad word: the token sequences that spell it.
SpellOut = Callable[[str], list[tuple[int, ...]]]


class SeenTokens:
    """The distinct tokens of a sequence, and how often each was generated; grows by one token a step."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        distinct = np.unique(np.asarray(prompt, np.int64))
        self._ids = distinct
        self._counts = np.zeros(len(distinct), np.float32)
        self._place = {token: i for i, token in enumerate(distinct.tolist())}

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """Times generated; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._place)]

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            room = max(16, place)
            self._ids = np.concatenate((self._ids, np.zeros(room, np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, np.float32)))
        self._ids[place] = token
        self._counts[place] += 1


@dataclass(slots=True)
class Asks:
    """One answer's wishes beyond its parameters.

    Attributes:
        seed: of this answer.
        ends: tokens barred before ``min_tokens``.
        bad_words: token sequences that must not be completed.
        seen: for penalties; None until the first token is due, and for rows without penalties.
        counted: output tokens entered in ``seen``.
    """

    seed: int
    ends: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    seen: SeenTokens | None = None
    counted: int = 0

    def update_seen(self, sequence: Sequence) -> SeenTokens:
        """Enter the tokens that came since the last call."""
        if self.seen is None:
            self.seen = SeenTokens(sequence.request.prompt_token_ids)
        start = sequence.num_prompt + self.counted
        for token in sequence.token_ids[start:]:
            self.seen.add(token)
            self.counted += 1
        return self.seen

    def barred(self, sequence: Sequence, ahead: int = 0) -> list[int]:
        """Tokens that may not come next, or next but ``ahead`` (then bad words are none)."""
        length = len(sequence.token_ids)
        early = length + ahead - sequence.num_prompt < sequence.request.params.min_tokens
        banned = list(self.ends) if early else []
        for word in self.bad_words:
            head = len(word) - 1
            # A word counts if it is spelled inside the answer; the prompt may end anyhow.
            if (
                head <= length - sequence.num_prompt
                and tuple(sequence.token_ids[length - head :]) == word[:-1]
            ):
                banned.append(word[-1])
        return banned


def make_asks(sequence: Sequence, seed: int, end_ids: frozenset[int], spell_out: SpellOut | None) -> Asks:
    """What an answer asks of sampling.

    Args:
        seed: the request's.
        end_ids: the model's end tokens.
        spell_out: encodes bad words; needed only where there are some.
    """
    params = sequence.request.params
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else end_ids)
    words: list[tuple[int, ...]] = []
    for word in params.bad_words:
        assert spell_out is not None, "bad_words without a tokenizer are refused before"
        words.extend(spell_out(word))
    return Asks(answer_seed(seed, sequence.index), tuple(sorted(ends)), tuple(words))


def penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Parameters of a step's rows as tensors; made once for a set of rows and kept while it lasts.

    Attributes:
        random: rows that are drawn; the others are greedy.
        filters: of the random rows.
        seeds: (random,) uint64, on the host.
        penalised: rows with a penalty.
        restless: rows that may bar tokens.
        bias: (row, token, value) columns, on the device.
        logprobs: rows that want log-probabilities, and how many.
    """

    random: list[int]
    filters: Filters
    seeds: NDArray[np.uint64]
    penalised: list[int]
    restless: list[int]
    bias: tuple[Tensor, Tensor, Tensor]
    logprobs: list[int]
    logprob_counts: list[int]

    @property
    def edits(self) -> bool:
        """Some row's logits are changed before the choice."""
        return bool(self.penalised or self.restless or self.bias[0].numel())


def row_settings(
    sequences: list[Sequence], asks: list[Asks], vocab_size: int, device: torch.device
) -> RowSettings:
    """Gather the parameters of a step's rows."""
    params = [s.request.params for s in sequences]
    random = [i for i, p in enumerate(params) if not p.greedy]
    drawn = [params[i] for i in random]
    bias = [(i, t, v) for i, p in enumerate(params) for t, v in p.logit_bias.items()]

    def placed(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return column(values, dtype, device)

    wanting = [(i, p.logprobs) for i, p in enumerate(params) if p.logprobs is not None]
    with np.errstate(divide="ignore"):
        log_min_p = np.log(np.array([p.min_p for p in drawn], np.float64))
    return RowSettings(
        random=random,
        filters=Filters(
            temperature=placed([p.temperature for p in drawn], torch.float32),
            top_k=placed(
                [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in drawn], torch.int64
            ),
            top_p=placed([p.top_p for p in drawn], torch.float64),
            log_min_p=placed(log_min_p.tolist(), torch.float32),
            any_cut=any(p.top_p < 1.0 or p.top_k > 0 for p in drawn),
            any_floor=any(p.min_p > 0.0 for p in drawn),
        ),
        seeds=np.array([asks[i].seed for i in random], np.uint64),
        penalised=[i for i, p in enumerate(params) if penalised(p)],
        restless=[
            i for i, (p, a) in enumerate(zip(params, asks, strict=True)) if p.min_tokens or a.bad_words
        ],
        bias=(
            placed([b[0] for b in bias], torch.int64),
            placed([b[1] for b in bias], torch.int64),
            placed([b[2] for b in bias], torch.float32),
        ),
        logprobs=[i for i, _ in wanting],
        logprob_counts=[count for _, count in wanting],
    )


@dataclass(slots=True)
class Penalties:
    """Entries of the penalised rows, on the host, one column each."""

    rows: list[NDArray[np.int64]] = field(default_factory=list)
    ids: list[NDArray[np.int64]] = field(default_factory=list)
    subtract: list[NDArray[np.float32]] = field(default_factory=list)
    factor: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, row: int, seen: SeenTokens, params: SamplingParams) -> None:
        counts = seen.counts
        self.rows.append(np.full(len(counts), row, np.int64))
        self.ids.append(seen.ids)
        self.subtract.append(
            params.frequency_penalty * counts + params.presence_penalty * (counts > 0).astype(np.float32)
        )
        self.factor.append(np.full(len(counts), params.repetition_penalty, np.float32))
