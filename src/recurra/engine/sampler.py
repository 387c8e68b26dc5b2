"""The next token of each row: one pass over all rows, greedy rows skip what they don't need."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurra.engine import rows
from recurra.engine.sampling_rows import Asks, Penalties, RowSettings, SpellOut, make_asks, row_settings
from recurra.engine.seeds import uniforms
from recurra.engine.transfer import column, to_device
from recurra.types import PositionLogprobs, Sequence


@dataclass(frozen=True, slots=True)
class Choices:
    """What was chosen.

    Attributes:
        tokens: a token for each row.
        best: the largest logit of each row, after penalties and bans: -inf where these left no token.
        logprobs: by row, for the rows that asked.
    """

    tokens: list[int]
    best: list[float]
    logprobs: dict[int, PositionLogprobs]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was chosen, on the device: perhaps still being computed.

    Attributes:
        tokens: (R,) int64.
        best: (R,) float32, the largest logit of each row, after penalties and bans.
        raw: log-probabilities (rows that asked, V), and their tokens; None where no row asked.
        settings: of the rows.
    """

    tokens: Tensor
    best: Tensor
    raw: tuple[Tensor, Tensor] | None
    settings: RowSettings


class Sampler:
    """Chooses tokens; keeps each live answer's seed and counts between steps.

    Args:
        vocab_size: V.
        device: where logits live.
        seed: of the seeds given to requests that bring none.
        end_ids: the model's end tokens.
        spell_out: encodes bad words, None without a tokenizer.
        texts: token id to its text, for log-probabilities.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        seed: int,
        end_ids: frozenset[int],
        spell_out: SpellOut | None,
        texts: rows.Texts,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.texts = texts
        self._end_ids = end_ids
        self._spell_out = spell_out
        self._seeds = random.Random(seed)
        self._asks: dict[Sequence, Asks] = {}
        self._choose = rows.chooser(vocab_size, device)
        self._last: tuple[list[Sequence], list[Asks], RowSettings] | None = None

    def add(self, answers: Iterable[Sequence]) -> None:
        """Meet the answers of a new request. One without a seed gets a fresh one."""
        seed: int | None = None
        for answer in answers:
            if seed is None:
                given = answer.request.params.seed
                seed = self._seeds.getrandbits(64) if given is None else given
            self._asks[answer] = make_asks(answer, seed, self._end_ids, self._spell_out)

    def forget(self, answer: Sequence) -> None:
        """Drop what is kept of an answer that ended."""
        self._asks.pop(answer, None)
        self._last = None

    @property
    def num_answers(self) -> int:
        """Answers that are remembered."""
        return len(self._asks)

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> Choices:
        """Choose a token for each row, and wait for it.

        Args:
            logits: (R, V) float32, may be overwritten.
            sequences: R of them, each with all its tokens so far.
        """
        drawn = self.draw(logits, sequences)
        return Choices(drawn.tokens.tolist(), drawn.best.tolist(), self.scores(drawn))

    def draw(self, logits: Tensor, sequences: list[Sequence], ahead: int = 0) -> Drawn:
        """Choose a token for each row without waiting for the device.

        Args:
            logits: (R, V) float32, may be overwritten.
            sequences: R of them.
            ahead: tokens that each of them got on the device and that the host doesn't know yet. Only where
                :meth:`needs_no_tokens` says so.
        """
        asks, settings = self._settings(sequences)
        raw = torch.log_softmax(logits[settings.logprobs], -1) if settings.logprobs else None
        if settings.edits:
            self._edit(logits, sequences, asks, settings, ahead)
        tokens = rows.argmax(logits)
        best = logits.gather(1, tokens[:, None])[:, 0]
        if settings.random:
            tokens = self._draw(logits, tokens, best, sequences, settings, ahead)
        scored = None if raw is None else (raw, tokens[settings.logprobs])
        return Drawn(tokens, best, scored, settings)

    def scores(self, drawn: Drawn) -> dict[int, PositionLogprobs]:
        """Log-probabilities by row, for the rows that asked; waits for the device where there are some."""
        if drawn.raw is None:
            return {}
        settings = drawn.settings
        found = rows.scores(*drawn.raw, settings.logprob_counts, self.texts)
        return dict(zip(settings.logprobs, found, strict=True))

    def needs_no_tokens(self, sequences: list[Sequence]) -> bool:
        """Whether the next choice depends on how many tokens there are, but not on which.

        Penalties and bad words look at the tokens; log-probabilities are fetched with every step.
        """
        asks, settings = self._settings(sequences)
        worded = any(asks[i].bad_words for i in settings.restless)
        return not (settings.penalised or settings.logprobs or worded)

    def _settings(self, sequences: list[Sequence]) -> tuple[list[Asks], RowSettings]:
        """This step's parameters: those of the last step if its rows are the same."""
        if self._last is None or self._last[0] != sequences:
            asks = [self._asks[s] for s in sequences]
            settings = row_settings(sequences, asks, self.vocab_size, self.device)
            self._last = (list(sequences), asks, settings)
        return self._last[1], self._last[2]

    # ---- changes to logits: bias, penalties, then bans ----

    def _edit(
        self, logits: Tensor, sequences: list[Sequence], asks: list[Asks], settings: RowSettings, ahead: int
    ) -> None:
        if settings.bias[0].numel():
            at_row, at_token, value = settings.bias
            logits.index_put_((at_row, at_token), value, accumulate=True)
        if settings.penalised:
            self._penalise(logits, sequences, asks, settings)
        banned = [(i, token) for i in settings.restless for token in asks[i].barred(sequences[i], ahead)]
        if banned:
            places = to_device(np.array(banned, np.int64).T.copy(), self.device)
            logits.index_put_((places[0], places[1]), torch.full((), float("-inf"), device=self.device))

    def _penalise(
        self, logits: Tensor, sequences: list[Sequence], asks: list[Asks], settings: RowSettings
    ) -> None:
        entries = Penalties()
        for i in settings.penalised:
            entries.add(i, asks[i].update_seen(sequences[i]), sequences[i].request.params)
        place = (self._column(entries.rows), self._column(entries.ids))
        factor = self._column(entries.factor)
        found = logits[place]
        found = torch.where(found > 0, found / factor, found * factor) - self._column(entries.subtract)
        logits.index_put_(place, found)

    def _column(self, parts: list[NDArray[np.int64]] | list[NDArray[np.float32]]) -> Tensor:
        return to_device(np.concatenate(parts), self.device)

    # ---- drawing ----

    def _draw(
        self,
        logits: Tensor,
        greedy: Tensor,
        best: Tensor,
        sequences: list[Sequence],
        settings: RowSettings,
        ahead: int,
    ) -> Tensor:
        """Replace the greedy choice of the rows that are drawn."""
        drawn = [sequences[i] for i in settings.random]
        places = np.array([len(s.token_ids) - s.num_prompt + ahead for s in drawn], np.uint64)
        uniform = torch.from_numpy(uniforms(settings.seeds, places))
        if len(drawn) == len(sequences):
            return self._choose(logits, best, settings.filters, uniform)
        at = column(settings.random, torch.int64, self.device)
        return greedy.index_copy(0, at, self._choose(logits[at], best[at], settings.filters, uniform))
