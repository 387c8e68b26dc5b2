"""One step in flight: texts are those of one step at a time, whatever ends or comes meanwhile."""

from __future__ import annotations

import random
from typing import Any

import pytest
from fakes import FakeModel, fake_engine, poison_slots, run, run_dry

from recurra.engine.engine import LLMEngine
from recurra.sampling_params import SamplingParams

PROMPTS = {str(n): [(7 * n + i) % 50 for i in range(n)] for n in (1, 2, 5, 9, 13)}


def ahead_engine(**settings: Any) -> LLMEngine:
    engine = fake_engine(**settings)
    engine._pipelined = True
    return engine


def count_ahead(engine: LLMEngine) -> list[int]:
    """Rows of each step that is launched before the one before is read."""
    sizes: list[int] = []
    launch = engine.runner.launch_after

    def counting(launched: Any, plan: Any) -> Any:
        found = launch(launched, plan)
        sizes.append(0 if found is None else len(plan.decode))
        return found

    engine.runner.launch_after = counting  # type: ignore[method-assign]
    return sizes


def test_greedy_answers_of_all_lengths_are_the_models_and_most_steps_are_ahead() -> None:
    model = FakeModel()
    engine = ahead_engine(model=model)
    sizes = count_ahead(engine)
    params = {
        name: SamplingParams(temperature=0.0, max_tokens=3 + 2 * i, ignore_eos=True)
        for i, name in enumerate(PROMPTS)
    }
    done = run(engine, PROMPTS, params)
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == model.greedy(prompt, params[name].max_tokens or 0), name
    assert max(sizes) == len(PROMPTS)
    assert len([size for size in sizes if size]) > 7


def test_rows_that_end_unforeseen_are_thrown_away() -> None:
    """End tokens are seen only when the next step is under way."""
    model = FakeModel()
    prompt = PROMPTS["9"]
    answer = model.greedy(prompt, 12)
    stop = answer[5]
    engine = ahead_engine(model=model, eos=(stop,))
    done = run(engine, PROMPTS, SamplingParams(temperature=0.0, max_tokens=12))
    assert done["9"].outputs[0].token_ids == answer[: answer.index(stop) + 1]
    for name, ids in PROMPTS.items():
        expected = model.greedy(ids, 12)
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        assert done[name].outputs[0].token_ids == expected, name


@pytest.mark.parametrize("seed", range(4))
def test_arrivals_aborts_and_reused_poisoned_slots(seed: int) -> None:
    rng = random.Random(seed)
    model = FakeModel()
    engine = ahead_engine(model=model, num_state_slots=3, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    todo = [(f"{name}-{i}", prompt) for i in range(4) for name, prompt in PROMPTS.items()]
    prompts, done, aborted = dict(todo), {}, set()
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.5:
            name, prompt = todo.pop()
            engine.add_request(name, prompt, params)
        if rng.random() < 0.05:
            aborted.add(rng.choice(list(prompts)))
            engine.abort_request(list(aborted))
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        if engine._ahead is None:  # free slots of a step under way may still be in it
            poison_slots(engine)
    for name, output in done.items():
        expected = model.greedy(prompts[name], 9)
        found = output.outputs[0].token_ids
        assert found == (expected[: len(found)] if output.outputs[0].finish_reason == "abort" else expected)


def test_draws_and_bans_by_length_are_the_same_as_one_step_at_a_time() -> None:
    params = SamplingParams(
        seed=5, max_tokens=12, temperature=0.8, top_p=0.9, top_k=20, min_tokens=4, n=2, logit_bias={3: 0.5}
    )
    here, there = fake_engine(eos=(3, 4)), ahead_engine(eos=(3, 4))
    sizes = count_ahead(there)
    one, other = (run(engine, PROMPTS, params) for engine in (here, there))
    for name in PROMPTS:
        assert [o.token_ids for o in one[name].outputs] == [o.token_ids for o in other[name].outputs], name
    assert max(sizes) > 1


def test_penalties_and_logprobs_wait_for_their_tokens() -> None:
    params = SamplingParams(seed=5, max_tokens=6, repetition_penalty=1.3, logprobs=2, ignore_eos=True)
    here, there = fake_engine(), ahead_engine()
    sizes = count_ahead(there)
    one, other = (run(engine, PROMPTS, params) for engine in (here, there))
    for name in PROMPTS:
        assert one[name].outputs[0].token_ids == other[name].outputs[0].token_ids
        assert one[name].outputs[0].logprobs == other[name].outputs[0].logprobs
    assert not any(sizes)


def test_an_engine_that_emptied_with_a_step_under_way_starts_anew() -> None:
    model = FakeModel()
    stop = model.greedy(PROMPTS["5"], 3)[-1]
    engine = ahead_engine(model=model, eos=(stop,))
    params = SamplingParams(temperature=0.0, max_tokens=30)
    first = run(engine, {"a": PROMPTS["5"]}, params)
    assert engine._ahead is not None, "what this test is about"
    engine.add_request("b", PROMPTS["5"], params)
    again = run_dry(engine)
    assert first["a"].outputs[0].token_ids == again["b"].outputs[0].token_ids
