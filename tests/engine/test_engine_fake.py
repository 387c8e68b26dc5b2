"""The step loop around a fake model: admission, forks, aborts, poison, limits."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import random
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeModel, fake_engine, poison_slots, run, run_dry

from recurra.engine.loading import end_ids
from recurra.errors import QueueFullError, RecurraError, RequestError
from recurra.sampling_params import SamplingParams
from recurra.types import CompletionOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=9)
PROMPTS = {
    str(i): [(7 * i + 3 * j) % 50 for j in range(length)] for i, length in enumerate([1, 2, 3, 9, 17, 33])
}


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("budget", [1, 2, 5, 7, 64])
def test_any_budget_and_any_number_of_slots_give_the_same_answers(slots: int, budget: int) -> None:
    model = FakeModel()
    engine = fake_engine(model, num_state_slots=slots, max_num_batched_tokens=budget)
    done = run(engine, PROMPTS, GREEDY)
    for name, prompt in PROMPTS.items():
        assert done[name].outputs[0].token_ids == model.greedy(prompt, 9)
        assert done[name].outputs[0].finish_reason == "length"


def test_staggered_arrivals_and_reused_slots_full_of_nan_change_nothing() -> None:
    model, rng = FakeModel(), random.Random(0)
    engine = fake_engine(model, num_state_slots=3, max_num_batched_tokens=6)
    todo, done = list(PROMPTS.items()) * 3, {}
    number = 0
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.3:
            name, prompt = todo.pop()
            engine.add_request(f"{name}/{number}", prompt, GREEDY)
            number += 1
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        poison_slots(engine)
    assert len(done) == 18
    for name, output in done.items():
        assert output.outputs[0].token_ids == model.greedy(PROMPTS[name.split("/")[0]], 9)


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_n_forks_equal_n_runs_of_their_seeds(slots: int) -> None:
    together = SamplingParams(n=5, seed=11, max_tokens=8, top_k=20, repetition_penalty=1.2)
    engine = fake_engine(num_state_slots=slots, max_num_batched_tokens=7)
    forked = run(engine, {"f": PROMPTS["4"]}, together)["f"]
    for i, one in enumerate(forked.outputs):
        single = SamplingParams(seed=11 + i, max_tokens=8, top_k=20, repetition_penalty=1.2)
        alone = run(fake_engine(), {"a": PROMPTS["4"]}, single)["a"]
        assert one.index == i
        assert one.token_ids == alone.outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in forked.outputs}) == 5
    assert engine.stats().prompt_tokens == len(PROMPTS["4"]), "the prompt is computed once"


def test_a_seeded_answer_does_not_depend_on_its_company() -> None:
    params = SamplingParams(seed=5, max_tokens=20, temperature=1.3)
    alone = run(fake_engine(), {"x": PROMPTS["3"]}, params)["x"].outputs[0].token_ids
    busy = fake_engine(num_state_slots=3, max_num_batched_tokens=9)
    others = SamplingParams(max_tokens=30, top_p=0.8, logprobs=2, logit_bias={3: 2.0})
    for i in range(4):
        busy.add_request(f"o{i}", PROMPTS["5"], others)
    for _ in range(3):
        busy.step()
    busy.add_request("x", PROMPTS["3"], params)
    assert run_dry(busy)["x"].outputs[0].token_ids == alone


def test_requests_without_a_seed_differ_but_an_engine_seed_repeats_them() -> None:
    params = SamplingParams(max_tokens=12)
    first, again = (run(fake_engine(seed=3), PROMPTS, params) for _ in range(2))
    other = run(fake_engine(seed=4), PROMPTS, params)
    same = {"a": [1, 2], "b": [1, 2]}
    two = run(fake_engine(), same, params)
    assert [o.outputs[0].token_ids for o in first.values()] == [
        o.outputs[0].token_ids for o in again.values()
    ]
    assert [o.outputs[0].token_ids for o in first.values()] != [
        o.outputs[0].token_ids for o in other.values()
    ]
    assert two["a"].outputs[0].token_ids != two["b"].outputs[0].token_ids


def test_poison_in_one_live_slot_ends_that_request_alone() -> None:
    model = FakeModel()
    engine = fake_engine(model, num_state_slots=4)
    for name in ("a", "b", "c"):
        engine.add_request(name, PROMPTS["3"], GREEDY)
    engine.step()
    slot = next(s for s in engine.scheduler._decoding if s.request.request_id == "b").slot
    engine.runner.pool.layers[0].ssm[slot] = float("nan")
    done = run_dry(engine)
    failed = done["b"].outputs[0]
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "not finite" in failed.error
    assert len(failed.token_ids) == 1
    assert done["a"].outputs[0].token_ids == done["c"].outputs[0].token_ids == model.greedy(PROMPTS["3"], 9)
    assert engine.stats().errors == 1
    assert not engine.runner.pool.layers[0].ssm[slot].isnan().any(), "its slot is reset"
    later = run(engine, {str(i): PROMPTS["3"] for i in range(8)}, GREEDY)
    assert {tuple(o.outputs[0].token_ids) for o in later.values()} == {tuple(model.greedy(PROMPTS["3"], 9))}


def test_poison_in_the_middle_of_a_prompt_ends_all_its_answers() -> None:
    engine = fake_engine(num_state_slots=2, max_num_batched_tokens=8)
    engine.add_request("bad", PROMPTS["5"], SamplingParams(n=3, max_tokens=4))
    engine.add_request("good", PROMPTS["1"], GREEDY)
    engine.step()
    (slot,) = [s.slot for s in engine.scheduler._prefilling]
    engine.runner.pool.layers[0].ssm[slot] = float("nan")
    (output,) = [o for o in engine.step() if o.request_id == "bad"]
    assert output.finished, "found at the end of the piece, not at the end of the prompt"
    assert [o.finish_reason for o in output.outputs] == ["error"] * 3
    assert "after 16 tokens" in str(output.outputs[0].error)
    assert run_dry(engine)["good"].outputs[0].finish_reason == "length"


def test_logits_that_are_not_finite_end_their_request_alone() -> None:
    model = FakeModel()
    engine = fake_engine(model)
    model.table[model.state_after(PROMPTS["2"]), 3] = float("inf")
    done = run(engine, {"bad": PROMPTS["2"], "good": PROMPTS["3"]}, SamplingParams(seed=1, max_tokens=5))
    assert done["bad"].outputs[0].finish_reason == "error"
    assert done["good"].outputs[0].finish_reason == "length"


def test_abort_between_steps_gives_one_final_output_and_every_slot() -> None:
    engine = fake_engine(num_state_slots=2, max_num_batched_tokens=6)
    engine.add_request("decoding", [1], SamplingParams(max_tokens=50, n=4))
    engine.step()
    engine.add_request("prefilling", PROMPTS["5"], GREEDY)
    engine.add_request("waiting", PROMPTS["5"], GREEDY)
    for _ in range(2):
        engine.step()
    engine.abort_request(["decoding", "prefilling", "waiting", "never heard of"])
    assert engine.stats().used_slots == 0
    assert engine.has_unfinished_requests(), "their end is still to be told"
    outputs = engine.step()
    assert {o.request_id for o in outputs} == {"decoding", "prefilling", "waiting"}
    assert all(o.finished and {a.finish_reason for a in o.outputs} == {"abort"} for o in outputs)
    assert not engine.has_unfinished_requests()
    assert engine.step() == []


def test_an_abort_keeps_the_answers_that_were_complete() -> None:
    engine = fake_engine(num_state_slots=1)
    engine.add_request("x", [4], SamplingParams(n=2, max_tokens=3, seed=0))
    while not any(a.finish_reason for o in engine.step() for a in o.outputs):
        pass
    engine.abort_request("x")
    (output,) = engine.step()
    assert [a.finish_reason for a in output.outputs] == ["length", "abort"]


def test_lengths_are_clamped_or_refused() -> None:
    engine = fake_engine(max_model_len=10)
    assert engine.max_model_len == 10
    done = run(engine, {"x": [1] * 7}, SamplingParams(max_tokens=None))
    assert len(done["x"].outputs[0].token_ids) == 3
    done = run(engine, {"x": [1] * 7}, SamplingParams(max_tokens=100, min_tokens=50))
    assert len(done["x"].outputs[0].token_ids) == 3
    with pytest.raises(RequestError, match="max_model_len is 10") as caught:
        engine.add_request("y", [1] * 10, GREEDY)
    assert (caught.value.status, caught.value.param, caught.value.code) == (
        400,
        "prompt",
        "context_length_exceeded",
    )
    scored = run(engine, {"z": [1] * 10}, SamplingParams(max_tokens=0, prompt_logprobs=0))["z"]
    assert scored.outputs[0].token_ids == []
    assert scored.outputs[0].finish_reason == "length"
    assert scored.prompt_logprobs is not None
    assert len(scored.prompt_logprobs) == 10


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([1, 50], "prompt_token_ids"),
        ([-1], "prompt_token_ids"),
        ([1.5], "prompt_token_ids"),
        ([True, False], "prompt_token_ids"),
        ([np.bool_(True)], "prompt_token_ids"),
        (torch.tensor([True, False]), "prompt_token_ids"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"tokens": [1]}, "prompt"),
        ({}, "prompt"),
        (None, "prompt"),
        (7, "prompt_token_ids"),
        ("text without a tokenizer", "prompt"),
    ],
)
def test_prompts_that_make_no_sense_are_refused_and_nothing_is_queued(prompt: object, param: str) -> None:
    engine = fake_engine()
    with pytest.raises(RequestError) as caught:
        engine.add_request("x", prompt, GREEDY)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert not engine.has_unfinished_requests()
    run(engine, {"x": [1]}, GREEDY)  # the id was not taken


@pytest.mark.parametrize(
    "ids", [np.array([3, 4], np.int32), [np.int64(3), np.uint8(4)], torch.tensor([3, 4])]
)
def test_integers_of_any_library_are_token_ids(ids: Any) -> None:
    model = FakeModel()
    (output,) = run(fake_engine(model), {"x": ids}, GREEDY).values()
    assert output.outputs[0].token_ids == model.greedy([3, 4], 9)
    assert {type(token) for token in output.prompt_token_ids} == {int}


@pytest.mark.parametrize("priority", [True, None, 1.0, "1"])
def test_a_priority_that_is_no_integer_is_refused(priority: Any) -> None:
    engine = fake_engine()
    with pytest.raises(RequestError, match="priority must be an integer") as caught:
        engine.add_request("x", [1], GREEDY, priority)
    assert caught.value.param == "priority"
    assert not engine.has_unfinished_requests()
    engine.add_request("x", [1], GREEDY, np.int64(2))  # type: ignore[arg-type]
    run_dry(engine)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(stop="a"), "stop"),
        (SamplingParams(bad_words=["a"]), "bad_words"),
        (SamplingParams(stop_token_ids=[50]), "stop_token_ids"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
    ],
)
def test_parameters_that_this_engine_lacks_are_refused(params: SamplingParams, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        fake_engine().add_request("x", [1], params)
    assert caught.value.param == param


def test_queue_limit_and_used_ids() -> None:
    engine = fake_engine(num_state_slots=1, max_queue_len=1)
    engine.add_request("a", [1], GREEDY)
    with pytest.raises(QueueFullError):
        engine.add_request("b", [1], GREEDY)
    engine.step()
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", [1], GREEDY)
    run_dry(engine)


def test_stats_count_tokens_and_warm_up_leaves_no_trace() -> None:
    engine = fake_engine(num_state_slots=2)
    said: list[tuple[str, int, int]] = []
    engine.warm_up(lambda *progress: said.append(progress))
    assert said[-1][1] == said[-1][2] > 0
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps, stats.finished) == (0, 0, 0, {})
    run(engine, {"a": [1, 2, 3], "b": [4]}, SamplingParams(max_tokens=5, n=2))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (4, 20)
    assert stats.finished == {"length": 4}
    assert stats.cached_tokens == stats.errors == 0


def test_times_are_in_order() -> None:
    metrics = run(fake_engine(), {"a": [1, 2, 3]}, GREEDY)["a"].metrics
    assert metrics is not None
    times = [
        metrics.arrival_time,
        metrics.first_scheduled_time,
        metrics.first_token_time,
        metrics.finished_time,
    ]
    assert all(a is not None and b is not None and a <= b for a, b in pairwise(times))


def test_outputs_are_cumulative_and_not_rewritten_later() -> None:
    engine = fake_engine()
    engine.add_request("a", [1, 2], SamplingParams(temperature=0.0, max_tokens=5, logprobs=1))
    seen = []
    while engine.has_unfinished_requests():
        seen += [o.outputs[0] for o in engine.step()]
    assert [len(o.token_ids) for o in seen] == [1, 2, 3, 4, 5]
    assert [len(o.logprobs or []) for o in seen] == [1, 2, 3, 4, 5]
    assert [o.finish_reason for o in seen] == [None] * 4 + ["length"]
    for number, output in enumerate(seen, 1):
        assert (
            output.tokens_after(number - 1)
            == output.token_ids[number - 1 :]
            == seen[-1].token_ids[number - 1 : number]
        )
        assert output.logprobs_after(number - 1) == (output.logprobs or [])[number - 1 :]
        whole = CompletionOutput(**dataclasses.asdict(output))
        assert whole.token_ids == output.token_ids
        assert pickle.loads(pickle.dumps(output)) == copy.deepcopy(output)
        assert repr(pickle.loads(pickle.dumps(output))) == repr(output).replace(
            "GrowingOutput", "CompletionOutput"
        )


def test_outputs_of_a_long_answer_share_its_tokens() -> None:
    """An output a step that copied its answer would make long answers cost the square of their length."""
    engine = fake_engine()
    engine.add_request("a", [1, 2], SamplingParams(temperature=0.0, max_tokens=3000, logprobs=0))
    kept, most = [], 0
    tracemalloc.start()
    while engine.has_unfinished_requests():
        kept += engine.step()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept) == 3000
    assert most < 20e6, "3000 copies of lists of up to 3000 pointers are 72 MB"


def test_a_request_that_fails_on_its_way_in_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.sampler, "add", lambda answers: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.add_request("a", [1], GREEDY)
    assert not engine.scheduler.has_unfinished()
    assert not engine.has_unfinished_requests()
    assert run(engine, {"a": [1, 2]}, GREEDY)["a"].outputs[0].token_ids == FakeModel().greedy([1, 2], 9)


def test_config_json_names_end_tokens_only_where_nothing_better_does() -> None:
    """Its ids are often a class's default: taking them too would end answers early."""
    model = SimpleNamespace(vocab_size=50)
    config = SimpleNamespace(eos_token_ids=(0, 99))
    for named, expected in [({3}, {3}), (set(), {0}), (None, {0})]:
        tokenizer = None if named is None else SimpleNamespace(eos_token_ids=frozenset(named))
        parts: Any = SimpleNamespace(model=model, model_config=config, tokenizer=tokenizer)
        assert end_ids(parts) == expected


def test_an_end_token_that_the_model_lacks_ends_nothing() -> None:
    model = FakeModel()
    patient = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=3)
    done = run(fake_engine(model, eos=(50256,)), {"x": [5]}, patient)["x"].outputs[0]
    assert (done.token_ids, done.finish_reason) == (model.greedy([5], 9), "length")


def test_end_tokens_and_stop_tokens() -> None:
    model = FakeModel()
    tokens = model.greedy([5], 9)
    end = tokens[4]
    cut = tokens[: tokens.index(end) + 1]
    done = run(fake_engine(model, eos=(end,)), {"x": [5]}, GREEDY)["x"].outputs[0]
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (cut, "stop", None)
    ignoring = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    assert run(fake_engine(model, eos=(end,)), {"x": [5]}, ignoring)["x"].outputs[0].token_ids == tokens
    stopping = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[end])
    done = run(fake_engine(model), {"x": [5]}, stopping)["x"].outputs[0]
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (cut, "stop", end)
    at_limit = SamplingParams(temperature=0.0, max_tokens=len(cut), stop_token_ids=[end])
    done = run(fake_engine(model), {"x": [5]}, at_limit)["x"].outputs[0]
    assert done.finish_reason == "stop", "a stop beats the length when both come at once"
    patient = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[end], min_tokens=9)
    done = run(fake_engine(model), {"x": [5]}, patient)["x"].outputs[0]
    assert len(done.token_ids) == 9
    assert end not in done.token_ids, "before min_tokens an end token isn't chosen"


def test_prompt_logprobs_over_every_chunk_edge_and_in_bounded_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel()
    monkeypatch.setattr("recurra.engine.rows.MAX_ELEMENTS", 3 * model.vocab_size)
    prompt = PROMPTS["5"]
    expected = [
        torch.log_softmax(model.table[model.state_after(prompt[:i])], -1)[prompt[i]].item()
        for i in range(1, len(prompt))
    ]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, n=2)
    for budget in (1, 2, 5, 8, 64):
        engine = fake_engine(model, max_num_batched_tokens=budget, num_state_slots=3)
        model.most_logit_rows = 0
        done = run(engine, {"a": prompt, "other": PROMPTS["4"], "b": prompt}, params)
        for name in ("a", "b"):
            scores = done[name].prompt_logprobs
            assert scores is not None
            assert scores[0] is None
            rest = scores[1:]
            got = [s[t].logprob for s, t in zip(rest, prompt[1:], strict=True) if s is not None]
            assert got == pytest.approx(expected, abs=1e-5)
            assert all(s is not None and 2 <= len(s) <= 3 for s in rest)
        assert model.most_logit_rows <= 3


def test_nothing_left_to_choose_is_an_error_of_its_own() -> None:
    model = FakeModel(vocab_size=2)
    params = SamplingParams(max_tokens=3, min_tokens=2, stop_token_ids=[0, 1])
    done = run(fake_engine(model), {"x": [1]}, params)["x"].outputs[0]
    assert done.finish_reason == "error"
    assert "leave no token" in str(done.error)


def test_a_forked_process_is_refused_not_left_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = fake_engine()
    engine.add_request("x", [5, 6], SamplingParams(max_tokens=2))
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RecurraError, match="spawn"):
        engine.step()
    monkeypatch.undo()
    assert run_dry(engine)["x"].finished
