"""The engine on a GPU, end to end, against transformers' plain forward (run with ``-m gpu``).

Nothing here is skipped: where there is no GPU, ``device="cuda"`` is refused and the tests fail.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from engine_models import TOLERANCE, RealModel
from fakes import poison_slots, run, run_dry

from recurra.engine.engine import LLMEngine
from recurra.engine.forward import EagerForward
from recurra.engine.graphs import GraphForward
from recurra.sampling_params import SamplingParams
from recurra.types import Sequence

pytestmark = pytest.mark.gpu

COUNT = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


def on_gpu(real: RealModel, **settings: Any) -> LLMEngine:
    """Engines that leave the GPU to others: kept states would take half of what is free."""
    chosen = {"device": "cuda", "dtype": "float32", "mamba_config": None, "num_state_slots": 8}
    return real.engine(**(chosen | {"prefix_cache_bytes": 1 << 24} | settings))


@pytest.mark.parametrize("budget", [3, 16, 1000])
def test_greedy_text_equals_a_full_forward_a_token_at_every_budget(real: RealModel, budget: int) -> None:
    done = run(on_gpu(real, max_num_batched_tokens=budget), real.prompts, GREEDY)
    for name in real.prompts:
        assert done[name].outputs[0].token_ids == real.greedy(name, COUNT), name


def test_eager_gives_the_same(real: RealModel) -> None:
    done = run(on_gpu(real, enforce_eager=True), real.prompts, GREEDY)
    for name in real.prompts:
        assert done[name].outputs[0].token_ids == real.greedy(name, COUNT), name


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_staggered_arrivals_in_reused_poisoned_slots(real: RealModel, slots: int) -> None:
    rng = random.Random(slots)
    engine = on_gpu(real, num_state_slots=slots, max_num_batched_tokens=20)
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
    done = run(
        on_gpu(real, max_num_batched_tokens=64), {str(i): real.prompts["41"] for i in range(12)}, GREEDY
    )
    assert {tuple(o.outputs[0].token_ids) for o in done.values()} == {tuple(real.greedy("41", COUNT))}


@pytest.mark.parametrize("budget", [7, 1000])
def test_prompt_logprobs_equal_transformers(real: RealModel, budget: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2, ignore_eos=True)
    done = run(on_gpu(real, max_num_batched_tokens=budget), real.prompts, params)
    for name, prompt in real.prompts.items():
        expected, scores = real.log_probs(prompt), done[name].prompt_logprobs
        assert scores is not None
        for i in range(1, len(prompt)):
            entry = scores[i]
            assert entry is not None
            for token, found in entry.items():
                assert found.logprob == pytest.approx(expected[i - 1, token].item(), abs=TOLERANCE)


def test_forks_seeds_and_filters_on_the_gpu(real: RealModel) -> None:
    """Drawn texts equal the CPU's: the same uniforms over the same distribution."""
    params = SamplingParams(
        n=4, seed=21, max_tokens=10, ignore_eos=True, top_p=0.9, top_k=30, min_p=0.001,
        repetition_penalty=1.1, frequency_penalty=0.2, logit_bias={5: 1.0}, min_tokens=3, logprobs=2,
    )  # fmt: skip
    here = run(real.engine(), {"x": real.prompts["17"]}, params)["x"]
    there = run(on_gpu(real, num_state_slots=2), {"x": real.prompts["17"]}, params)["x"]
    assert [o.token_ids for o in there.outputs] == [o.token_ids for o in here.outputs]


def _decoding(engine: LLMEngine, name: str) -> Sequence | None:
    return next((s for s in engine.scheduler._decoding if s.request.request_id == name), None)


def test_poison_in_a_live_slot_harms_nobody_else(real: RealModel) -> None:
    engine = on_gpu(real)
    for name in ("3", "15", "41"):
        engine.add_request(name, real.prompts[name], GREEDY)
    while (victim := _decoding(engine, "15")) is None:
        engine.step()
    slot = victim.slot
    engine.runner.pool.layers[1].ssm[slot] = float("nan")
    done = run_dry(engine)
    assert done["15"].outputs[0].finish_reason == "error"
    for name in ("3", "41"):
        assert done[name].outputs[0].token_ids == real.greedy(name, COUNT)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_weights_run_and_one_prompt_has_one_answer(real: RealModel, dtype: str) -> None:
    engine = on_gpu(real, dtype=dtype)
    done = run(engine, {str(i): real.prompts["17"] for i in range(8)}, GREEDY)
    assert len({tuple(o.outputs[0].token_ids) for o in done.values()}) == 1
    assert all(o.outputs[0].finish_reason == "length" for o in done.values())


def test_slots_fill_the_share_of_memory_that_was_given(mamba2: RealModel) -> None:
    engine = mamba2.engine(
        device="cuda",
        mamba_config=None,
        max_num_seqs=None,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
    )
    free, total = torch.cuda.mem_get_info()
    assert free > 0.4 * total
    assert engine.limits.max_num_seqs == engine.slots.num_slots == 256


def test_warm_up_leaves_nothing_to_compile(mamba2: RealModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    engine = on_gpu(mamba2, num_state_slots=64, max_num_seqs=64)
    engine.warm_up()
    compiled: list[str] = []
    monkeypatch.setattr(
        knobs.runtime, "jit_post_compile_hook", lambda *a, **k: compiled.append(str(k.get("fn", a)))
    )
    run(engine, {"x": mamba2.prompts["16"]}, SamplingParams(max_tokens=2, seed=1))
    many = {str(i): [1 + (7 * i + t) % 50 for t in range(1 + 37 * i % 301)] for i in range(64)}
    run(engine, many, SamplingParams(max_tokens=4, seed=1, top_k=5, min_p=0.01, ignore_eos=True))
    run(engine, {"long": [1 + t % 50 for t in range(5001)]}, SamplingParams(max_tokens=2, seed=1))
    assert not compiled


@pytest.mark.parametrize("count", [*range(1, 9), 15, 16, 17, 33, 64, 65, 70])
def test_recorded_steps_of_every_size_give_what_eager_ones_give(mamba2: RealModel, count: int) -> None:
    """NaN in the scratch slot and in every free one, in both."""
    prompts = {str(i): [1 + (11 * i + t) % 50 for t in range(3 + i % 5)] for i in range(count)}
    texts = []
    for eager in (False, True):
        engine = on_gpu(mamba2, enforce_eager=eager, num_state_slots=70, max_num_seqs=70)
        assert isinstance(engine.runner.forward, EagerForward if eager else GraphForward)
        done = run(engine, prompts, SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
        texts.append({name: output.outputs[0].token_ids for name, output in done.items()})
    assert texts[0] == texts[1]
