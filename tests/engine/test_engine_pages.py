"""Requests on a tiny hybrid whose pages run out: the texts are those of one request at a time with all the pages."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_models import RealModel
from fakes import poison_slots, run, run_dry

import checkpoints
from recurra.config.engine import EngineConfig
from recurra.engine.engine import LLMEngine
from recurra.errors import ConfigError, RequestError
from recurra.sampling_params import SamplingParams

COUNT = 14
PAGE = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> RealModel:
    """Attention and Mamba-2 in turns."""
    rng = random.Random(3)
    prompts = {
        str(n): [rng.randrange(1, checkpoints.VOCABULARY) for _ in range(n)] for n in (1, 7, 8, 9, 21, 40)
    }
    return RealModel(write(tmp_path_factory.mktemp("bamba") / "model"), prompts)


def write(folder: Path) -> Path:
    from transformers import BambaConfig, BambaForCausalLM

    sizes = {
        "hidden_size": 48, "num_hidden_layers": 3, "attn_layer_indices": [0, 2], "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 60, "mamba_n_heads": 8, "mamba_d_state": 20,
        "mamba_n_groups": 2, "mamba_chunk_size": 16, "final_norm": "model.final_layernorm.weight",
    }  # fmt: skip
    return checkpoints.write_hybrid(folder, BambaConfig, BambaForCausalLM, sizes)


def make(hybrid: RealModel, backend: str = "cpu", **settings: Any) -> LLMEngine:
    chosen = {"max_num_seqs": 6, "block_size": PAGE, "max_model_len": 64, "enable_prefix_caching": False}
    engine = hybrid.engine(mamba_config={"backend": backend}, **(chosen | settings))
    poison(engine)
    return engine


def poison(engine: LLMEngine) -> None:
    """Fill every page and slot that nobody holds with NaN."""
    poison_slots(engine)
    free = [0, *engine.pages._free]
    for layer in engine.runner.pages.layers:
        for tensor in layer:
            tensor[free] = float("nan")


def answers(engine: LLMEngine, hybrid: RealModel, params: SamplingParams = GREEDY) -> dict[str, list[int]]:
    done = run(engine, hybrid.prompts, params)
    check_all_is_free(engine)
    return {name: done[name].outputs[0].token_ids for name in hybrid.prompts}


def check_all_is_free(engine: LLMEngine) -> None:
    stats = engine.stats()
    assert (stats.used_pages, stats.free_pages) == (0, engine.pages.num_pages)
    engine.pages.check()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("budget", [5, 1000])
def test_greedy_text_equals_a_full_forward_a_token(hybrid: RealModel, budget: int, backend: str) -> None:
    engine = make(hybrid, backend, max_num_batched_tokens=budget)
    found = answers(engine, hybrid)
    assert found == {name: hybrid.greedy(name, COUNT) for name in hybrid.prompts}
    assert engine.stats().preemptions == 0


@pytest.mark.parametrize("pages", [8, 9, 11, 15])
def test_preempted_equals_uninterrupted(hybrid: RealModel, pages: int) -> None:
    engine = make(hybrid, num_kv_pages=pages, max_num_batched_tokens=16)
    found = answers(engine, hybrid)
    assert engine.stats().preemptions > 0, "what this test is about"
    assert found == {name: hybrid.greedy(name, COUNT) for name in hybrid.prompts}


@pytest.mark.parametrize("pages", [8, 12, 20])
def test_kept_states_and_running_sequences_share_few_pages(hybrid: RealModel, pages: int) -> None:
    """Cached texts give their pages up to those that run, and begin others while they last."""
    engine = make(hybrid, num_kv_pages=pages, max_num_batched_tokens=16, enable_prefix_caching=True)
    for _ in range(3):
        done = run(engine, hybrid.prompts, GREEDY)
        for name in hybrid.prompts:
            assert done[name].outputs[0].token_ids == hybrid.greedy(name, COUNT), name
        engine.pages.check()
        poison(engine)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.states_given_up > 0
    for _ in range(2):
        again = run(engine, {"40": hybrid.prompts["40"]}, GREEDY)
        assert again["40"].outputs[0].token_ids == hybrid.greedy("40", COUNT)
    assert engine.stats().prefix_hit > stats.prefix_hit


def test_drawn_texts_do_not_depend_on_preemption(hybrid: RealModel) -> None:
    params = SamplingParams(seed=4, max_tokens=COUNT, temperature=0.9, ignore_eos=True)
    roomy, tight = make(hybrid), make(hybrid, num_kv_pages=9)
    assert answers(tight, hybrid, params) == answers(roomy, hybrid, params)
    assert tight.stats().preemptions > 0


@pytest.mark.parametrize("seed", range(3))
def test_arrivals_aborts_and_reused_poisoned_pages(hybrid: RealModel, seed: int) -> None:
    rng = random.Random(seed)
    engine = make(hybrid, num_kv_pages=10, num_state_slots=4, max_num_batched_tokens=12)
    todo = [(f"{name}-{i}", prompt) for i in range(2) for name, prompt in hybrid.prompts.items()]
    rng.shuffle(todo)
    done = {}
    while todo or engine.has_unfinished_requests():
        if todo and rng.random() < 0.6:
            name, prompt = todo.pop()
            engine.add_request(name, prompt, GREEDY, priority=rng.randrange(2))
            if rng.random() < 0.2:
                engine.abort_request(name)
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output.outputs[0]
        poison(engine)
    for name, output in done.items():
        expected = hybrid.greedy(name.split("-")[0], COUNT)
        assert output.token_ids == (expected if output.finish_reason == "length" else []), name
    check_all_is_free(engine)


@pytest.mark.parametrize("slots", [2, 6])
@pytest.mark.parametrize("pages", [8, 40])
def test_forks_equal_runs_of_their_seeds_and_share_full_pages(
    hybrid: RealModel, pages: int, slots: int
) -> None:
    params = SamplingParams(n=4, seed=21, max_tokens=10, ignore_eos=True)
    engine = make(hybrid, num_kv_pages=pages, num_state_slots=slots)
    engine.add_request("x", hybrid.prompts["21"], params)
    engine.step()
    if pages == 40:
        assert engine.stats().used_pages == 2 + min(slots, 4), "two full pages together, the last one each"
    forked = run_dry(engine)["x"]
    check_all_is_free(engine)
    for i, one in enumerate(forked.outputs):
        single = SamplingParams(seed=21 + i, max_tokens=10, ignore_eos=True)
        alone = run(make(hybrid), {"x": hybrid.prompts["21"]}, single)["x"]
        assert one.token_ids == alone.outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in forked.outputs}) > 1


def test_what_never_fits_is_refused_with_the_numbers(hybrid: RealModel) -> None:
    engine = make(hybrid, num_kv_pages=8)
    engine.scheduler.paging.allocator.allocate(1)  # no matter: all pages count
    engine.max_model_len = 1000
    with pytest.raises(
        RequestError, match=r"40 tokens and max_tokens is 25: .* 9 pages .* 8 in all.*64 tokens"
    ) as e:
        engine.add_request("x", hybrid.prompts["40"], SamplingParams(max_tokens=25))
    assert e.value.param == "max_tokens"
    assert not engine.has_unfinished_requests()


def test_pages_limit_the_longest_request(hybrid: RealModel) -> None:
    assert make(hybrid, num_kv_pages=5, max_model_len=None).max_model_len == 40
    with pytest.raises(ConfigError, match=r"max_model_len=64: the 5 pages .* 40 tokens.* at most 40"):
        make(hybrid, num_kv_pages=5)
    with pytest.raises(ConfigError, match=r"num_kv_pages=\d+: only \d+ pages fit"):
        make(hybrid, num_kv_pages=1 << 40)
    with pytest.raises(ConfigError, match=r"block_size=24: not a power of two"):
        EngineConfig(model="m", block_size=24)


def test_warm_up_leaves_no_page_behind(hybrid: RealModel) -> None:
    engine = make(hybrid, num_kv_pages=8)
    engine.warm_up()
    check_all_is_free(engine)
