"""The engine on real tiny models, held against transformers' plain forward."""

from __future__ import annotations

import random

import pytest
import torch
from engine_models import TOLERANCE, RealModel
from fakes import poison_slots, run, run_dry

from recurra.engine.forward import EagerForward, StackForward
from recurra.sampling_params import SamplingParams

COUNT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_greedy_text_equals_a_full_forward_a_token_at_every_budget(
    real: RealModel, budget: int, backend: str
) -> None:
    engine = real.engine(max_num_batched_tokens=budget, mamba_config={"backend": backend})
    done = run(engine, real.prompts, GREEDY)
    for name in real.prompts:
        assert done[name].outputs[0].token_ids == real.greedy(name, COUNT), name


def test_eager_equals_the_fused_decode_step(real: RealModel) -> None:
    assert isinstance(real.engine().runner.forward, StackForward), "what the other tests run on"
    engine = real.engine(enforce_eager=True)
    assert isinstance(engine.runner.forward, EagerForward)
    done = run(engine, real.prompts, GREEDY)
    for name in real.prompts:
        assert done[name].outputs[0].token_ids == real.greedy(name, COUNT)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_staggered_arrivals_in_reused_poisoned_slots(real: RealModel, slots: int) -> None:
    rng = random.Random(slots)
    engine = real.engine(num_state_slots=slots, max_num_batched_tokens=20)
    todo, done = list(real.prompts), {}
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.4:
            name = todo.pop()
            engine.add_request(name, real.prompts[name], GREEDY)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        poison_slots(engine)
    for name in real.prompts:
        assert done[name].outputs[0].token_ids == real.greedy(name, COUNT), name


def test_identical_prompts_have_one_distinct_answer(real: RealModel) -> None:
    prompt = real.prompts["41"]
    engine = real.engine(max_num_seqs=8, max_num_batched_tokens=64)
    done = run(engine, {str(i): prompt for i in range(12)}, GREEDY)
    assert {tuple(o.outputs[0].token_ids) for o in done.values()} == {tuple(real.greedy("41", COUNT))}


def test_one_token_prompts_always_have_the_same_answer(real: RealModel) -> None:
    engine = real.engine()
    answers = {
        tuple(run(engine, {"x": real.prompts["1"]}, GREEDY)["x"].outputs[0].token_ids) for _ in range(6)
    }
    assert answers == {tuple(real.greedy("1", COUNT))}


@pytest.mark.parametrize("budget", [3, 7, 16, 1000])
def test_prompt_logprobs_equal_transformers(real: RealModel, budget: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, ignore_eos=True)
    done = run(real.engine(max_num_batched_tokens=budget), real.prompts, params)
    for name, prompt in real.prompts.items():
        expected, scores = real.log_probs(prompt), done[name].prompt_logprobs
        assert scores is not None
        assert scores[0] is None
        assert len(scores) == len(prompt)
        for i in range(1, len(prompt)):
            entry = scores[i]
            assert entry is not None
            for token, found in entry.items():
                assert found.logprob == pytest.approx(expected[i - 1, token].item(), abs=TOLERANCE)
            assert prompt[i] in entry


def test_logprobs_equal_log_softmax_of_transformers(mamba2: RealModel) -> None:
    params = SamplingParams(seed=3, max_tokens=6, logprobs=3, temperature=2.0, ignore_eos=True)
    output = run(mamba2.engine(), {"x": mamba2.prompts["17"]}, params)["x"].outputs[0]
    expected = mamba2.log_probs(mamba2.prompts["17"] + output.token_ids)[16:]
    assert output.logprobs is not None
    total = 0.0
    for row, token, entry in zip(expected, output.token_ids, output.logprobs, strict=False):
        likeliest = row.argsort(descending=True).tolist()
        assert set(likeliest[:3]) | {token} == set(entry)
        for candidate, found in entry.items():
            assert found.logprob == pytest.approx(row[candidate].item(), abs=TOLERANCE)
            assert found.rank == likeliest.index(candidate) + 1
            assert found.decoded_token is not None
        total += row[token].item()
    assert output.cumulative_logprob == pytest.approx(total, abs=6 * TOLERANCE)


def test_n_forks_equal_n_runs_of_their_seeds(real: RealModel) -> None:
    params = SamplingParams(n=4, seed=21, max_tokens=10, ignore_eos=True)
    forked = run(real.engine(num_state_slots=2), {"x": real.prompts["17"]}, params)["x"]
    for i, one in enumerate(forked.outputs):
        single = SamplingParams(seed=21 + i, max_tokens=10, ignore_eos=True)
        alone = run(real.engine(), {"x": real.prompts["17"]}, single)["x"]
        assert one.token_ids == alone.outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in forked.outputs}) > 1


def test_a_seeded_text_does_not_depend_on_its_company(real: RealModel) -> None:
    params = SamplingParams(seed=9, max_tokens=COUNT, top_p=0.9, ignore_eos=True)
    alone = run(real.engine(), {"x": real.prompts["15"]}, params)["x"].outputs[0].token_ids
    engine = real.engine(max_num_batched_tokens=24)
    for name, prompt in real.prompts.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    for _ in range(2):
        engine.step()
    engine.add_request("x", real.prompts["15"], params)
    assert run_dry(engine)["x"].outputs[0].token_ids == alone


def test_poison_in_a_live_slot_harms_nobody_else(real: RealModel) -> None:
    engine = real.engine()
    for name in ("3", "15", "41"):
        engine.add_request(name, real.prompts[name], GREEDY)
    for _ in range(2):  # a prompt, then its last token
        engine.step()
    slot = next(s.slot for s in engine.scheduler._decoding if s.request.request_id == "15")
    engine.runner.pool.layers[1].ssm[slot] = float("nan")
    done = run_dry(engine)
    assert done["15"].outputs[0].finish_reason == "error"
    for name in ("3", "41"):
        assert done[name].outputs[0].token_ids == real.greedy(name, COUNT)
    later = run(engine, {f"{i}": real.prompts["16"] for i in range(10)}, GREEDY)
    assert {tuple(o.outputs[0].token_ids) for o in later.values()} == {tuple(real.greedy("16", COUNT))}


def test_text_and_stop_strings_with_the_real_tokenizer(mamba2: RealModel) -> None:
    engine = mamba2.engine()
    text = "The quick brown fox"
    whole = run(engine, {"x": [1]}, GREEDY)["x"].outputs[0].text
    assert engine.tokenizer is not None
    engine.add_request("x", text, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    output = run_dry(engine)["x"]
    assert output.prompt == text
    assert output.prompt_token_ids == engine.tokenizer.encode(text)
    full = output.outputs[0].text
    assert full == engine.tokenizer.decode(output.outputs[0].token_ids)
    assert whole
    stop = full[7:10]
    at = full.find(stop)
    engine.add_request("x", text, SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop))
    shown = []
    while engine.has_unfinished_requests():
        shown += [o.outputs[0] for o in engine.step()]
    assert (shown[-1].text, shown[-1].finish_reason, shown[-1].stop_reason) == (full[:at], "stop", stop)
    assert all(full[:at].startswith(o.text) for o in shown)


def test_bad_words_never_appear(mamba2: RealModel) -> None:
    engine = mamba2.engine()
    free = run(engine, {"x": [5, 6]}, GREEDY)["x"].outputs[0]
    assert engine.tokenizer is not None
    word = next(
        w for t in free.token_ids if (w := engine.tokenizer.token_to_string(t)).isascii() and w.strip()
    )
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, bad_words=[word])
    output = run(engine, {"x": [5, 6]}, params)["x"].outputs[0]
    spelled = tuple(engine.tokenizer.encode(word, add_special_tokens=False))
    ids = output.token_ids
    assert all(tuple(ids[i : i + len(spelled)]) != spelled for i in range(len(ids)))


def test_a_state_is_zeros_before_and_after_its_sequence(mamba2: RealModel) -> None:
    engine = mamba2.engine(poison=False, num_state_slots=2)
    run(engine, mamba2.prompts, SamplingParams(n=2, max_tokens=3))
    assert not torch.count_nonzero(engine.runner.pool.rows[1:])
