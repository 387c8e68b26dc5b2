"""A model made of arithmetic: its state is a number that depends on every token, in order.

A state that is lost, mixed up or read from somebody else's slot changes the logits altogether, and NaN
in a slot reaches whatever reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recurra.cache.pool import slot_bytes
from recurra.cache.spec import ConvSSM, StateSpec, TensorSpec, scale_spec
from recurra.config.engine import EngineConfig
from recurra.config.settle import ModelFacts, resolve, settle_slots
from recurra.device import detect
from recurra.engine.engine import LLMEngine
from recurra.engine.loading import Parts
from recurra.engine.tokenizer import Tokenizer
from recurra.ops import build
from recurra.ops.decode_stack import StackWeights
from recurra.sampling_params import SamplingParams
from recurra.types import CompletionOutput, ForwardBatch, RequestOutput

MODULUS = 1009


@dataclass(frozen=True)
class FakeConfig:
    """What the engine reads of a model's configuration."""

    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    architecture: str = "Fake"
    path: Path = Path("fake")


@dataclass
class FakeModel:
    """State after tokens t1 ... tn: h = (31 h + t + 1) mod 1009, from 0. Logits: row h of a table."""

    vocab_size: int = 50
    chunk_size: int = 4
    spread: float = 3.0
    most_logit_rows: int = 0  # largest request of logits() so far
    tokens_seen: int = 0
    state_specs: tuple[StateSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        conv = TensorSpec("conv", (1, 1), torch.float32)
        ssm = TensorSpec("ssm", (1, 1, 1), torch.float32)
        self.state_specs = (StateSpec("fake", (conv, ssm, scale_spec(ssm.shape, ssm.dtype))),)
        generator = torch.Generator().manual_seed(1)
        self.table = self.spread * torch.randn(MODULUS, self.vocab_size, generator=generator)

    def forward(self, batch: ForwardBatch, states: tuple[ConvSSM, ...]) -> Tensor:
        h = states[0].ssm[:, 0, 0, 0]
        out = torch.zeros(len(batch.token_ids), 2)
        self.tokens_seen += len(batch.token_ids)
        for row in range(batch.num_decode):
            self._advance(h, int(batch.slots[row]), batch, row, out)
        bounds = batch.cu_seqlens.tolist()
        for i, slot in enumerate(batch.prefill_slots.tolist()):
            if not batch.has_state[i]:
                h[slot] = 0.0
            for row in range(batch.num_decode + bounds[i], batch.num_decode + bounds[i + 1]):
                self._advance(h, slot, batch, row, out)
        return out

    def _advance(self, h: Tensor, slot: int, batch: ForwardBatch, row: int, out: Tensor) -> None:
        h[slot] = torch.remainder(31 * h[slot] + batch.token_ids[row] + 1, MODULUS)
        out[row, 0] = h[slot]

    def logits(self, hidden: Tensor) -> Tensor:
        self.most_logit_rows = max(self.most_logit_rows, len(hidden))
        broken = hidden.isnan().any(-1, keepdim=True)
        return torch.where(broken, torch.nan, self.table[hidden[:, 0].nan_to_num().long()])

    def stack_weights(self) -> StackWeights | None:
        return None

    def state_after(self, tokens: list[int]) -> int:
        h = 0
        for token in tokens:
            h = (31 * h + token + 1) % MODULUS
        return h

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What a correct engine answers at temperature 0."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.table[self.state_after(tokens)].argmax()))
        return tokens[len(prompt) :]


def fake_engine(
    model: FakeModel | None = None,
    tokenizer: Tokenizer | None = None,
    eos: tuple[int, ...] = (),
    poison: bool = True,
    **settings: Any,
) -> LLMEngine:
    """An engine around a fake model; free slots hold NaN."""
    model = model or FakeModel()
    config = EngineConfig(model="fake", **({"device": "cpu", "num_threads": 1} | settings))
    device = detect(config.device, config.num_threads)
    settled = resolve(config, ModelFacts(torch.float32), device)
    limits, slots = settle_slots(config, device, slot_bytes(model.state_specs), 1 << 30)
    parts = Parts(
        settled,
        limits,
        slots,
        FakeConfig(model.vocab_size, eos),
        model,
        build(device, "reference"),
        tokenizer,
    )  # type: ignore[arg-type]
    engine = LLMEngine(config, parts=parts)
    if poison:
        poison_slots(engine)
    return engine


def poison_slots(engine: LLMEngine) -> None:
    """Fill every slot that nobody holds with NaN, the scratch slot too."""
    taken = engine.slots._used
    for layer in engine.runner.pool.layers:
        for state in layer[:3]:
            for slot in range(state.shape[0]):
                if slot not in taken:
                    state[slot] = float("nan")


def run(
    engine: LLMEngine, prompts: dict[str, list[int]], params: SamplingParams | dict[str, SamplingParams]
) -> dict[str, RequestOutput]:
    """Answer everything at once."""
    for name, prompt in prompts.items():
        engine.add_request(name, prompt, params[name] if isinstance(params, dict) else params)
    return run_dry(engine)


def run_dry(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left; the final outputs by request."""
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.request_id not in done, "one final output each"
                done[output.request_id] = output
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.used_slots) == (0, 0, 0)
    assert stats.free_slots == engine.slots.num_slots
    assert engine.runner.sampler.num_answers == 0, "nothing is kept of requests that ended"
    return done


def answer(output: RequestOutput, index: int = 0) -> CompletionOutput:
    return output.outputs[index]
