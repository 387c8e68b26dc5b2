"""States in a caller's hands: the past is not computed again, and never another model's."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_models import RealModel

from recurra.engine.llm import LLM
from recurra.engine.sessions import State
from recurra.errors import RequestError, StateError
from recurra.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def _llm(real: RealModel, **settings: object) -> LLM:
    return LLM.of_engine(real.engine(**settings))


def _prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 300) for _ in range(length)]


def _whole(real: RealModel, prompt: list[int]) -> list[int]:
    llm = _llm(real, enable_prefix_caching=False)
    return llm.generate([prompt], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.mark.parametrize("length", [2, 7, 30])
def test_a_saved_state_goes_on_in_another_engine(real: RealModel, tmp_path: Path, length: int) -> None:
    llm, prompt = _llm(real), _prompt(length)
    output = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
    text = prompt + output.outputs[0].token_ids
    state = llm.save_state(output)
    assert state.token_ids == text
    assert state.num_computed >= len(text) - 1
    state.save(tmp_path / "s.safetensors")
    found = State.load(tmp_path / "s.safetensors")
    assert torch.equal(found.saved.row, state.saved.row)
    other = _llm(real)
    more = _prompt(5, 1)
    answer = other.generate([more], GREEDY, use_tqdm=False, state=found)[0]
    assert answer.prompt_token_ids == text + more
    assert answer.num_cached_tokens == state.num_computed
    assert other.llm_engine.stats().prompt_tokens == len(text) + 5 - state.num_computed
    assert answer.outputs[0].token_ids == _whole(real, text + more)


def test_a_prompts_state_forks_into_many_continuations(mamba2: RealModel) -> None:
    llm, prompt = _llm(mamba2), _prompt(25)
    state = llm.save_state(prompt)
    assert state.num_computed == 24
    before = state.saved.row.clone()
    turns = [_prompt(n, n) for n in (1, 2, 9)]
    fresh = _llm(mamba2)
    answers = fresh.generate(turns, GREEDY, use_tqdm=False, state=[state.fork() for _ in turns])
    assert [a.num_cached_tokens for a in answers] == [24, 24, 24]
    for turn, answer in zip(turns, answers, strict=True):
        assert answer.outputs[0].token_ids == _whole(mamba2, prompt + turn)
    assert torch.equal(state.saved.row, before)


def test_text_goes_on_after_a_state(mamba2: RealModel) -> None:
    llm = _llm(mamba2)
    state = llm.save_state("The quick brown fox")
    answer = llm.generate(" jumps", GREEDY, use_tqdm=False, state=state)[0]
    tokenizer = llm.get_tokenizer()
    jumps = tokenizer.encode(" jumps", add_special_tokens=False)
    assert answer.prompt_token_ids == tokenizer.encode("The quick brown fox") + jumps
    alone = llm.generate("", GREEDY, use_tqdm=False, state=state)[0]
    assert alone.prompt_token_ids == state.token_ids


def test_what_cannot_be_saved_or_continued_is_refused(real: RealModel, tmp_path: Path) -> None:
    llm = _llm(real)
    state = llm.save_state(_prompt(12))
    with pytest.raises(StateError, match="another model's"):
        _llm(real, dtype="bfloat16").generate([[1]], GREEDY, use_tqdm=False, state=state)
    off = _llm(real, enable_prefix_caching=False)
    with pytest.raises(RequestError, match="enable_prefix_caching"):
        off.save_state(_prompt(12))
    with pytest.raises(RequestError, match="enable_prefix_caching"):
        off.generate([[1]], GREEDY, use_tqdm=False, state=state)
    with pytest.raises(RequestError, match="2 states for 1 prompts"):
        llm.generate([[1]], GREEDY, use_tqdm=False, state=[state, state])
    with pytest.raises(RequestError, match="two tokens"):
        llm.save_state([1])
    with pytest.raises(StateError, match="can't be read"):
        State.load(tmp_path / "none.safetensors")
