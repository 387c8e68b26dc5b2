"""Kept states of a tiny hybrid: pages of keys and values are shared, copied where both would write, given back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_models import RealModel
from fakes import run_dry
from test_engine_pages import PAGE, write

from recurra.engine.engine import LLMEngine
from recurra.engine.llm import LLM
from recurra.engine.sessions import State
from recurra.sampling_params import SamplingParams
from recurra.types import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    """Attention and Mamba-2 in turns."""
    return RealModel(write(tmp_path_factory.mktemp("bamba") / "model"), {})


def _engine(hybrid: RealModel, **settings: Any) -> LLMEngine:
    return hybrid.engine(**({"max_num_seqs": 4, "block_size": PAGE, "max_model_len": 128} | settings))


def _prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 300) for _ in range(length)]


def _ask(engine: LLMEngine, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    engine.add_request("x", prompt, params)
    output = run_dry_kept(engine)["x"]
    _check(engine)
    return output


def run_dry_kept(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Step until nothing is left."""
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
    return done


def _check(engine: LLMEngine) -> None:
    """Nobody but entries holds pages, each as often as entries name it."""
    assert engine.cache is not None
    engine.cache.tiers.check()
    engine.pages.check()
    held: dict[int, int] = {}
    for entry in engine.cache.reuse.tree:
        for page in entry.pages:
            held[page] = held.get(page, 0) + 1
    assert held == engine.pages._holders


def _cold(hybrid: RealModel, prompt: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    engine = _engine(hybrid, enable_prefix_caching=False)
    engine.add_request("x", prompt, params)
    return [answer.token_ids for answer in run_dry(engine)["x"].outputs]


@pytest.mark.parametrize("length", [9, 15, 16, 17, 18, 24, 25, 40])
def test_an_exact_repeat_computes_one_token(hybrid: RealModel, length: int) -> None:
    engine, prompt = _engine(hybrid), _prompt(length)
    cold = _cold(hybrid, prompt)
    for cached in (0, length - 1, length - 1):
        output = _ask(engine, prompt)
        assert output.num_cached_tokens == cached
        assert [output.outputs[0].token_ids] == cold


def test_turns_and_partings_go_on_from_shared_pages(hybrid: RealModel) -> None:
    engine, prompt = _engine(hybrid), _prompt(21)
    first = _ask(engine, prompt)
    text = prompt + first.outputs[0].token_ids
    for seed in (1, 2, 3):  # the same past, three futures
        turn = text + _prompt(7, seed)
        output = _ask(engine, turn)
        assert output.num_cached_tokens >= len(text) - 1
        assert [output.outputs[0].token_ids] == _cold(hybrid, turn)
    for seed, least in ((4, 0), (5, 0), (6, 13)):
        other = prompt[:13] + _prompt(20, seed)
        output = _ask(engine, other)
        assert output.num_cached_tokens >= least
        assert [output.outputs[0].token_ids] == _cold(hybrid, other)


def test_several_answers_fork_from_a_kept_state(hybrid: RealModel) -> None:
    engine, prompt = _engine(hybrid), _prompt(30)
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=12, ignore_eos=True)
    cold = _cold(hybrid, prompt, params)
    for cached in (0, 29):
        output = _ask(engine, prompt, params)
        assert output.num_cached_tokens == cached
        assert [answer.token_ids for answer in output.outputs] == cold


@pytest.mark.parametrize("pages", [13, 17, 24])
def test_kept_pages_give_way_to_those_that_run(hybrid: RealModel, pages: int) -> None:
    engine = _engine(hybrid, num_kv_pages=pages, max_model_len=64, max_num_batched_tokens=19)
    draw = random.Random(pages)
    shared = _prompt(17, 1)
    prompts = [(shared if draw.random() < 0.6 else []) + _prompt(draw.randint(3, 25), n) for n in range(10)]
    for number, prompt in enumerate(prompts * 2):
        engine.add_request(f"{number}", prompt, GREEDY)
        engine.add_request(f"gone {number}", prompt, GREEDY)
    done, steps = {}, 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        steps += 1
        engine.abort_request([f"gone {n}" for n in range(20) if (n * 3) % 30 < steps])
    for number, prompt in enumerate(prompts * 2):
        assert [done[f"{number}"].outputs[0].token_ids] == _cold(hybrid, prompt), number
    _check(engine)
    stats = engine.stats()
    assert stats.states_given_up > 0
    assert stats.prefix_hit > 0
    assert engine.cache is not None
    while engine.cache.tiers.make_way():
        pass
    assert engine.stats().used_pages == 0


def test_states_and_pages_outlive_the_engine(hybrid: RealModel, tmp_path: Path) -> None:
    prompt = _prompt(21)
    engine = _engine(hybrid, prefix_cache_dir=str(tmp_path))
    first = _ask(engine, prompt)
    text = prompt + first.outputs[0].token_ids + _prompt(6, 9)
    engine.close()
    again = _engine(hybrid, prefix_cache_dir=str(tmp_path))
    output = _ask(again, text)
    assert output.num_cached_tokens == len(text) - 6 - 1
    assert [output.outputs[0].token_ids] == _cold(hybrid, text)
    again.close()
    other = _engine(hybrid, prefix_cache_dir=str(tmp_path), block_size=16)
    assert _ask(other, text).num_cached_tokens == 0
    other.close()


@pytest.mark.parametrize("length", [15, 16, 17, 30])
def test_a_saved_state_goes_on_in_another_engine(hybrid: RealModel, tmp_path: Path, length: int) -> None:
    state = LLM.of_engine(_engine(hybrid)).save_state(_prompt(length))
    state.save(tmp_path / "s.safetensors")
    engine = _engine(hybrid)
    more = _prompt(5, 1)
    found = State.load(tmp_path / "s.safetensors")
    (answer,) = LLM.of_engine(engine).generate([more], GREEDY, use_tqdm=False, state=found)
    assert answer.num_cached_tokens == length - 1
    assert [answer.outputs[0].token_ids] == _cold(hybrid, _prompt(length) + more)
    _check(engine)
