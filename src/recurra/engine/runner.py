"""Runs a plan: states loaded, tensors built, model, next tokens. Everything that touches the device."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.engine.batch import StepBatch, build
from recurra.engine.forward import Forward
from recurra.engine.prompt_scores import prompt_scores
from recurra.engine.sampler import Sampler
from recurra.engine.scheduler import Plan
from recurra.models import CausalLM
from recurra.types import SCRATCH_SLOT, PositionLogprobs, Sequence

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


class Runner:
    """The model with its states on a device.

    Args:
        model: gives logits; owns the kernel chunk size.
        forward: how hidden states are computed.
        pool: the states.
        sampler: the next tokens.
        device: where all of it lives.
    """

    def __init__(
        self, model: CausalLM, forward: Forward, pool: StatePool, sampler: Sampler, device: torch.device
    ) -> None:
        self.model = model
        self.forward = forward
        self.pool = pool
        self.sampler = sampler
        self.device = device

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Compute a step. States of the plan's sequences advance; no others change."""
        for sequence, snapshot in plan.restores:
            self.pool.restore(sequence.slot, snapshot)
        step = build(plan, self.model.chunk_size, self.device)
        self.pool.rounding.advance()
        hidden = self.forward(step.forward)
        result = StepResult()
        self._find_broken(plan, step, hidden, result)
        self._score_prompts(plan, hidden, result)
        self._choose(plan, step, hidden, result)
        return result

    def fork(self, source: Sequence, target: Sequence) -> None:
        """Copy the state of one sequence into the slot of another."""
        self.pool.fork(source.slot, target.slot)

    def save(self, sequence: Sequence) -> Tensor:
        """A copy of a sequence's state, kept in the host's memory so that waiting answers take none
        of the GPU's."""
        return self.pool.save(sequence.slot).cpu()

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence that ended; its slot is left as zeros."""
        self.sampler.forget(sequence)
        if sequence.slot != SCRATCH_SLOT:
            self.pool.reset(sequence.slot)

    def _find_broken(self, plan: Plan, step: StepBatch, hidden: Tensor, result: StepResult) -> None:
        """Fail sequences whose newest hidden state isn't finite.

        A state that isn't finite makes the output of its layer so, and the residual stream carries
        that to the end: one sum a row finds it, after every step and every piece of a prompt.
        """
        last = hidden if hidden.shape[0] == step.last_rows.shape[0] else hidden[step.last_rows]
        fine = torch.isfinite(last.sum(-1, dtype=torch.float32)).tolist()
        if all(fine):
            return
        for sequence, good in zip(plan.decode, fine, strict=False):
            if not good:
                result.failed[sequence] = NOT_FINITE.format(count=sequence.num_computed + 1)
        for chunk, good in zip(plan.prefill, fine[len(plan.decode) :], strict=True):
            if not good:
                result.failed |= dict.fromkeys(chunk.answers, NOT_FINITE.format(count=chunk.end))

    def _score_prompts(self, plan: Plan, hidden: Tensor, result: StepResult) -> None:
        at = len(plan.decode)
        for chunk in plan.prefill:
            request = chunk.sequence.request
            if request.params.prompt_logprobs is not None and chunk.sequence not in result.failed:
                part = hidden[at : at + chunk.length]
                scores = prompt_scores(chunk, part, self.model, self.sampler.texts)
                result.prompt_logprobs[request.request_id] = scores
            at += chunk.length

    def _choose(self, plan: Plan, step: StepBatch, hidden: Tensor, result: StepResult) -> None:
        """Give every decoding sequence, and every answer of a completed prompt, its next token."""
        sequences, sources = list(plan.decode), list(range(len(plan.decode)))
        row = len(sequences)
        for chunk in plan.prefill:
            if chunk.is_last:
                sequences.extend(chunk.answers)
                sources.extend([row] * len(chunk.answers))
                row += 1
        if not sequences:
            return
        rows = step.forward.logit_rows
        logits = self.model.logits(hidden if rows.shape[0] == hidden.shape[0] else hidden[rows])
        if row < len(sources):
            logits = logits[torch.tensor(sources, device=logits.device)]
        choices = self.sampler.sample(logits, sequences)
        for i, sequence in enumerate(sequences):
            if sequence in result.failed:
                continue
            if not math.isfinite(choices.best[i]):
                problem = NO_TOKEN if choices.best[i] == -math.inf else NOT_FINITE
                result.failed[sequence] = problem.format(count=len(sequence.token_ids))
                continue
            result.tokens[sequence] = choices.tokens[i]
            if i in choices.logprobs:
                result.logprobs[sequence] = choices.logprobs[i]
