"""Runs a plan: states loaded, tensors built, model, next tokens. Everything that touches the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recurra.cache.pages import PagePool, pages_for
from recurra.cache.pool import StatePool
from recurra.engine.batch import StepBatch, build
from recurra.engine.forward import Forward
from recurra.engine.prompt_scores import prompt_scores
from recurra.engine.sampler import Drawn, Sampler
from recurra.engine.scheduler import Plan, PrefillChunk
from recurra.engine.transfer import Fetch, column
from recurra.models import CausalLM
from recurra.types import SCRATCH_SLOT, PositionLogprobs, Sequence, Status

NOT_FINITE = (
    "the model's output is not finite (NaN or infinity) after {count} tokens; this answer ends here and its "
    "state is discarded. Other requests are unaffected."
)
NO_TOKEN = "logit_bias, bad_words and min_tokens together leave no token to choose after {count} tokens."


@dataclass(slots=True)
class StepResult:
    """What a step gave.

    Attributes:
        tokens: the new token of each sequence that got one.
        failed: sequences that can't go on, and why.
        logprobs: candidates at the new token, for those that asked.
        prompt_logprobs: by request id, scores of prompt tokens in order, continuing earlier ones.
    """

    tokens: dict[Sequence, int] = field(default_factory=dict)
    failed: dict[Sequence, str] = field(default_factory=dict)
    logprobs: dict[Sequence, PositionLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[PositionLogprobs]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SavedState:
    """All that a sequence knows, outside of its slot and its pages.

    Attributes:
        row: of the state pool.
        pages: keys and values of each attention layer, (pages, page size, heads, dim).
        first: which of the sequence's pages the first of these is.
    """

    row: Tensor
    pages: list[Tensor]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is being computed.

    Attributes:
        plan: what it computes.
        sequences: those that get a token.
        drawn: their tokens, on the device; None where nobody gets one.
        prompt_scores: of the pieces whose request asked.
        fetched: on its way to the host: a sum of each sequence's newest hidden state, then ``drawn``'s tokens
            and best logits.
    """

    plan: Plan
    sequences: list[Sequence]
    drawn: Drawn | None
    prompt_scores: tuple[tuple[PrefillChunk, list[PositionLogprobs]], ...]
    fetched: Fetch


class Runner:
    """The model with its states on a device.

    Args:
        model: gives logits; owns the kernel chunk size.
        forward: how hidden states are computed.
        pool: the states.
        sampler: the next tokens.
        device: where all of it lives.
        pages: keys and values; None: the model has none.
    """

    def __init__(
        self,
        model: CausalLM,
        forward: Forward,
        pool: StatePool,
        sampler: Sampler,
        device: torch.device,
        pages: PagePool | None = None,
    ) -> None:
        self.model = model
        self.forward = forward
        self.pool = pool
        self.sampler = sampler
        self.device = device
        self.pages = pages or PagePool((), 0, 0, device)

    def run(self, plan: Plan) -> StepResult:
        """Compute a step. States of the plan's sequences advance; no others change."""
        return self.finish(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Launched:
        """Queue a step on the device and return without waiting for it."""
        for sequence, snapshot in plan.restores:
            self._restore(sequence, snapshot)
        return self._launch(plan, build(plan, self.model.chunk_size, self.device, self.pages.page_size), 0)

    @torch.inference_mode()
    def launch_after(self, launched: Launched, plan: Plan) -> Launched | None:
        """Queue the step after one whose tokens nobody has read yet.

        Args:
            launched: the step before, decode rows only.
            plan: the next one, of some of its rows in the same order.

        Returns:
            None: what some row asks for depends on the tokens.
        """
        if launched.drawn is None or not self.sampler.needs_no_tokens(list(plan.decode)):
            return None
        tokens = launched.drawn.tokens
        if plan.decode != launched.plan.decode:
            places = {sequence: row for row, sequence in enumerate(launched.plan.decode)}
            kept = column([places[sequence] for sequence in plan.decode], torch.int64, self.device)
            tokens = tokens.index_select(0, kept)
        step = build(plan, self.model.chunk_size, self.device, self.pages.page_size, tokens)
        return self._launch(plan, step, 1)

    @torch.inference_mode()
    def finish(self, launched: Launched) -> StepResult:
        """Wait for a step and read what it gave; nothing for sequences that ended since it was launched."""
        checks, *chosen = launched.fetched.read()
        result = StepResult()
        self._find_broken(launched.plan, checks, result)
        for chunk, scores in launched.prompt_scores:
            if chunk.sequence not in result.failed:
                result.prompt_logprobs[chunk.sequence.request.request_id] = scores
        if launched.drawn is not None:
            self._read_choices(launched, chosen[0].tolist(), chosen[1].tolist(), result)
        return _of_the_living(result)

    @torch.inference_mode()
    def fork(self, source: Sequence, target: Sequence) -> None:
        """Copy the state of one sequence into the slot of another, and into pages that it doesn't share."""
        self.pool.fork(source.slot, target.slot)
        for mine, other in zip(source.pages, target.pages, strict=False):
            if mine != other:
                self.pages.copy(mine, other)

    @torch.inference_mode()
    def save(self, sequence: Sequence) -> SavedState:
        """A copy of a sequence's state and pages, kept in the host's memory so that those who wait take none
        of the GPU's."""
        held: list[Tensor] = []
        if self.pages.page_size:
            used = sequence.pages[: pages_for(sequence.num_computed, self.pages.page_size)]
            held = [tensor.cpu() for tensor in self.pages.save(used)]
        return SavedState(self.pool.save(sequence.slot).cpu(), held)

    def _restore(self, sequence: Sequence, saved: SavedState | Tensor) -> None:
        """Load what :meth:`save` gave, or a row of the state pool alone."""
        if isinstance(saved, Tensor):
            saved = SavedState(saved, [])
        self.pool.restore(sequence.slot, saved.row)
        if saved.pages:
            last = saved.first + saved.pages[0].shape[0]
            self.pages.restore(sequence.pages[saved.first : last], saved.pages)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended; its slot is left as zeros."""
        self.sampler.forget(sequence)
        if sequence.slot != SCRATCH_SLOT:
            self.clear(sequence)

    def clear(self, sequence: Sequence) -> None:
        """Leave a sequence's slot as zeros; what its pages hold is overwritten before it is read."""
        self.pool.reset(sequence.slot)

    def _launch(self, plan: Plan, step: StepBatch, ahead: int) -> Launched:
        self.pool.rounding.advance()
        hidden = self.forward(step.forward)
        last = hidden if hidden.shape[0] == step.last_rows.shape[0] else hidden[step.last_rows]
        checks = last.sum(-1, dtype=torch.float32)
        scores = tuple(self._score_prompts(plan, hidden))
        sequences, drawn = self._choose(plan, step, hidden, ahead)
        if drawn is None:
            return Launched(plan, sequences, None, scores, Fetch(checks))
        return Launched(
            plan, sequences, drawn, scores, Fetch(checks, drawn.tokens.to(torch.int32), drawn.best.float())
        )

    def _find_broken(self, plan: Plan, checks: NDArray[Any], result: StepResult) -> None:
        """Fail sequences whose newest hidden state isn't finite.

        A state that isn't finite makes the output of its layer so, and the residual stream carries
        that to the end: one sum a row finds it, after every step and every piece of a prompt.
        """
        fine = np.isfinite(checks)
        if fine.all():
            return
        for sequence, good in zip(plan.decode, fine, strict=False):
            if not good:
                result.failed[sequence] = NOT_FINITE.format(count=sequence.num_computed + 1)
        for chunk, good in zip(plan.prefill, fine[len(plan.decode) :], strict=True):
            if not good:
                result.failed |= dict.fromkeys(chunk.answers, NOT_FINITE.format(count=chunk.end))

    def _score_prompts(
        self, plan: Plan, hidden: Tensor
    ) -> Iterator[tuple[PrefillChunk, list[PositionLogprobs]]]:
        at = len(plan.decode)
        for chunk in plan.prefill:
            if chunk.sequence.request.params.prompt_logprobs is not None:
                part = hidden[at : at + chunk.length]
                yield chunk, prompt_scores(chunk, part, self.model, self.sampler.texts)
            at += chunk.length

    def _choose(
        self, plan: Plan, step: StepBatch, hidden: Tensor, ahead: int
    ) -> tuple[list[Sequence], Drawn | None]:
        """Choose the next token of every decoding sequence, and of every answer of a completed prompt."""
        sequences, sources = list(plan.decode), list(range(len(plan.decode)))
        row = len(sequences)
        for chunk in plan.prefill:
            if chunk.is_last:
                sequences.extend(chunk.answers)
                sources.extend([row] * len(chunk.answers))
                row += 1
        if not sequences:
            return sequences, None
        rows = step.forward.logit_rows
        logits = self.model.logits(hidden if rows.shape[0] == hidden.shape[0] else hidden[rows])
        if row < len(sources):
            logits = logits[column(sources, torch.int64, logits.device)]
        return sequences, self.sampler.draw(logits, sequences, ahead)

    def _read_choices(
        self, launched: Launched, tokens: list[int], best: list[float], result: StepResult
    ) -> None:
        assert launched.drawn is not None
        logprobs = self.sampler.scores(launched.drawn)
        for i, sequence in enumerate(launched.sequences):
            if sequence in result.failed:
                continue
            if not math.isfinite(best[i]):
                problem = NO_TOKEN if best[i] == -math.inf else NOT_FINITE
                result.failed[sequence] = problem.format(count=len(sequence.token_ids))
                continue
            result.tokens[sequence] = tokens[i]
            if i in logprobs:
                result.logprobs[sequence] = logprobs[i]


def _of_the_living(result: StepResult) -> StepResult:
    """The same without sequences that ended between launch and now."""
    for found in (result.tokens, result.failed, result.logprobs):
        for sequence in [s for s in found if s.status is Status.FINISHED]:
            del found[sequence]
    return result
