"""Begun from a kept state or computed whole: the same answer, and never silently."""

from __future__ import annotations

import random
import zlib
from pathlib import Path
from typing import Any

import pytest
from engine_models import RealModel
from fakes import run_dry

from recurra.engine.engine import LLMEngine
from recurra.errors import ConfigError, RequestError
from recurra.sampling_params import SamplingParams
from recurra.types import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
TOLERANCE = 1e-3


def _prompt(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1, 300) for _ in range(length)]


def _ask(
    engine: LLMEngine, prompt: list[int] | dict[str, Any], params: SamplingParams = GREEDY
) -> RequestOutput:
    engine.add_request("x", prompt, params)
    return run_dry(engine)["x"]


def _same(found: RequestOutput, cold: RequestOutput) -> None:
    for warm, fresh in zip(found.outputs, cold.outputs, strict=True):
        assert warm.token_ids == fresh.token_ids
        assert warm.logprobs is not None
        assert fresh.logprobs is not None
        for a, b in zip(warm.logprobs, fresh.logprobs, strict=True):
            assert a.keys() == b.keys()
            assert all(abs(a[t].logprob - b[t].logprob) < TOLERANCE for t in a)


def _cold(real: RealModel, prompt: list[int], params: SamplingParams = GREEDY) -> RequestOutput:
    return _ask(real.engine(enable_prefix_caching=False), prompt, params)


def _sums(engine: LLMEngine) -> dict[int, int]:
    """Checksum of each kept row."""
    assert engine.cache is not None
    rows = engine.cache.tiers.rows
    return {row: zlib.crc32(rows.get(row).numpy().tobytes()) for row in rows.used}


@pytest.mark.parametrize("length", [9, 10, 16, 17, 18, 33, 63])
def test_an_exact_repeat_computes_one_token(real: RealModel, length: int) -> None:
    engine, prompt = real.engine(), _prompt(length)
    first = _ask(engine, prompt)
    sums = _sums(engine)
    engine.reset_stats()
    again = _ask(engine, prompt)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, length - 1)
    assert engine.stats().prompt_tokens == 1
    assert (engine.stats().prefix_hit, engine.stats().cached_tokens) == (1, length - 1)
    cold = _cold(real, prompt)
    _same(first, cold)
    _same(again, cold)
    after = _sums(engine)
    assert {row: after[row] for row in sums} == sums


@pytest.mark.parametrize("common", [8, 15, 16, 17, 31, 40])
@pytest.mark.parametrize("budget", [7, 1024])
def test_the_place_where_prompts_part_is_kept_when_the_second_comes(
    mamba2: RealModel, common: int, budget: int
) -> None:
    engine = mamba2.engine(max_num_batched_tokens=budget)
    prompts = [_prompt(common) + _prompt(20, seed) for seed in (1, 2, 3)]
    cached = []
    for prompt in prompts:
        output = _ask(engine, prompt)
        cached.append(output.num_cached_tokens)
        _same(output, _cold(mamba2, prompt))
    assert cached[0] == cached[1] == 0
    assert cached[2] >= common


def test_a_conversation_goes_on_from_the_end_of_its_answer(real: RealModel) -> None:
    engine, prompt = real.engine(), _prompt(20)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
    for turn in range(3):
        output = _ask(engine, prompt, params)
        _same(output, _cold(real, prompt, params))
        assert output.num_cached_tokens == (0 if turn == 0 else len(prompt) - 10 - 1)
        prompt = prompt + output.outputs[0].token_ids + _prompt(10, turn + 50)


def test_a_long_prompt_edited_late_keeps_what_is_before_the_edit(mamba2: RealModel) -> None:
    engine = mamba2.engine(prefix_cache_interval=32)
    prompt = _prompt(200)
    _ask(engine, prompt)
    edited = prompt[:150] + _prompt(50, 9)
    output = _ask(engine, edited)
    assert output.num_cached_tokens == 128
    _same(output, _cold(mamba2, edited))


def test_mixed_batches_aborts_and_chunks_change_nothing(real: RealModel) -> None:
    engine = real.engine(max_num_batched_tokens=23, max_num_seqs=4, num_state_slots=4)
    draw = random.Random(4)
    shared = [_prompt(n, n) for n in (12, 17, 40)]
    prompts = [draw.choice(shared) + _prompt(draw.choice((1, 5, 16, 30)), 100 + n) for n in range(12)]
    cold = [_cold(real, prompt) for prompt in prompts]
    for number, prompt in enumerate(prompts * 2):
        engine.add_request(f"{number}", prompt, GREEDY)
        engine.add_request(f"gone {number}", prompt + _prompt(9, number), GREEDY)
    done: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = output
        steps += 1
        engine.abort_request([f"gone {n}" for n in range(24) if (n * 3) % 40 < steps])
    for number in range(24):
        _same(done[f"{number}"], cold[number % 12])
    assert engine.stats().prefix_hit > 12
    assert engine.stats().used_slots == 0
    assert engine.cache is not None
    engine.cache.tiers.check()
    engine.cache.reuse.tree.check()
    assert all(entry.pins == 0 for entry in engine.cache.reuse.tree)


def test_several_answers_begin_from_a_kept_state(real: RealModel) -> None:
    engine, prompt = real.engine(), _prompt(30)
    params = SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=12, ignore_eos=True, logprobs=1)
    cold = _cold(real, prompt, params)
    _ask(engine, prompt)
    output = _ask(engine, prompt, params)
    assert output.num_cached_tokens == 29
    _same(output, cold)


def test_little_room_costs_hits_and_nothing_else(real: RealModel) -> None:
    size = real.engine(poison=False).runner.pool.bytes_per_slot
    engine = real.engine(prefix_cache_bytes=2 * size)
    prompts = [_prompt(20, seed) for seed in range(5)]
    for prompt in prompts * 2:
        _same(_ask(engine, prompt), _cold(real, prompt))
    stats = engine.stats()
    assert stats.states_given_up > 0
    assert stats.prefix_evicted > 0
    assert stats.device_state_bytes <= 2 * size


def test_a_salt_keeps_states_apart_and_is_counted(mamba2: RealModel) -> None:
    engine, prompt = mamba2.engine(), _prompt(20)
    _ask(engine, prompt)
    salted = {"prompt_token_ids": prompt, "cache_salt": "a"}
    cached = [
        _ask(engine, asked).num_cached_tokens for asked in (salted, salted, salted | {"cache_salt": "b"})
    ]
    assert cached == [0, 19, 0]
    assert (engine.stats().prefix_salted_away, engine.stats().prefix_no_snapshot) == (2, 1)
    with pytest.raises(RequestError, match="cache_salt must be a non-empty string"):
        engine.add_request("y", {"prompt_token_ids": prompt, "cache_salt": ""}, GREEDY)


def test_prompt_logprobs_are_computed_whole_and_counted(mamba2: RealModel) -> None:
    engine, prompt = mamba2.engine(), _prompt(20)
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    cold = _cold(mamba2, prompt, params)
    _ask(engine, prompt)
    output = _ask(engine, prompt, params)
    assert output.num_cached_tokens == 0
    assert engine.stats().prefix_prompt_logprobs == 1
    assert output.prompt_logprobs is not None
    assert cold.prompt_logprobs is not None
    for token, a, b in zip(prompt[1:], output.prompt_logprobs[1:], cold.prompt_logprobs[1:], strict=True):
        assert a is not None
        assert b is not None
        assert abs(a[token].logprob - b[token].logprob) < TOLERANCE


def test_an_answer_that_fails_leaves_no_state_and_takes_its_source_along(mamba2: RealModel) -> None:
    engine, prompt = mamba2.engine(), _prompt(30)
    _ask(engine, prompt)
    assert engine.cache is not None
    for entry in engine.cache.reuse.tree:
        engine.cache.tiers.rows.get(entry.handle.row).fill_(255)  # NaN
    assert _ask(engine, prompt).outputs[0].finish_reason == "error"
    output = _ask(engine, prompt)
    assert output.num_cached_tokens == 0
    _same(output, _cold(mamba2, prompt))


def test_states_outlive_the_engine_and_a_damaged_one_is_left_aside(
    real: RealModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [_prompt(20, 1), _prompt(25, 2)]
    engine = real.engine(prefix_cache_dir=str(tmp_path))
    for prompt in prompts:
        _ask(engine, prompt)
    with pytest.raises(ConfigError, match="another process"):
        real.engine(prefix_cache_dir=str(tmp_path))
    assert engine.cache is not None
    engine.close()
    names = list(tmp_path.glob("*/*.safetensors"))
    assert len(names) >= 2
    for path in names[:1]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    again = real.engine(prefix_cache_dir=str(tmp_path))
    outputs = [_ask(again, prompt) for prompt in prompts]
    for output, prompt in zip(outputs, prompts, strict=True):
        _same(output, _cold(real, prompt))
    assert sorted(o.num_cached_tokens > 0 for o in outputs) == [False, True]
    assert again.stats().states_damaged == 1
    assert "checksum is wrong" in caplog.text
    again.close()
    other = real.engine(prefix_cache_dir=str(tmp_path), dtype="bfloat16")
    assert _ask(other, prompts[0]).num_cached_tokens == 0
    other.close()


@pytest.mark.parametrize(
    ("settings", "works"),
    [
        ({"prefix_cache_bytes": 1}, "one state takes"),
        ({"prefix_cache_dir": "x", "enable_prefix_caching": False}, "nothing is kept"),
        ({"prefix_cache_dir": "x", "prefix_cache_disk_bytes": 1}, "holds no state"),
        ({"prefix_cache_host_bytes": 1 << 30}, "host's memory already"),
    ],
)
def test_what_would_make_the_cache_inert_is_refused(
    mamba2: RealModel, settings: dict[str, Any], works: str
) -> None:
    with pytest.raises(ConfigError, match=works):
        mamba2.engine(**settings)
