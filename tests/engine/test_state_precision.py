"""The engine on the shipped model with states of every precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recurra import LLM, SamplingParams

MODEL = str(Path(__file__).parents[2] / "models" / "recurra-tiny")
PROMPTS = [[0, 700, 710, 720], [0, 900, 33, 44, 55, 66]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)


def _run(dtype: str, *, by_chance: bool = False, **settings: object) -> tuple[list[list[int]], torch.Tensor]:
    """Tokens of two requests, and the bytes of the pool while they were held."""
    llm = LLM(
        MODEL, mamba_ssm_cache_dtype=dtype, mamba_config={"enable_stochastic_rounding": by_chance},
        max_num_seqs=2, num_threads=1, skip_tokenizer_init=True, **settings,
    )  # fmt: skip
    engine = llm.llm_engine
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, GREEDY)
    tokens: dict[str, list[int]] = {}
    rows = torch.empty(0)
    while engine.has_unfinished_requests():
        if any(len(t) == 12 for t in tokens.values()):
            rows = engine.runner.pool.rows.clone()
        for output in engine.step():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    moved = int(engine.runner.pool.rounding.step)
    assert moved >= GREEDY.max_tokens if by_chance else moved == 0, "every step draws afresh"
    return [tokens[str(n)] for n in range(len(PROMPTS))], rows


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_a_run_is_repeatable_and_its_seed_matters(dtype: str) -> None:
    first, rows = _run(dtype, by_chance=True, seed=1)
    again, same = _run(dtype, by_chance=True, seed=1)
    _, other = _run(dtype, by_chance=True, seed=2)
    _, nearest = _run(dtype)
    assert first == again
    assert torch.equal(rows, same)
    assert not torch.equal(rows, other)
    assert not torch.equal(rows, nearest)


def test_narrow_states_take_less_memory_and_start_like_wide_ones() -> None:
    wide, rows = _run("float32")
    for dtype, share in (("float16", 0.55), ("int8", 0.32), ("fp8", 0.32)):
        narrow, less = _run(dtype)
        assert less.shape[1] < share * rows.shape[1]
        assert narrow[0][0] == wide[0][0], "a prompt is rounded once"


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_step_by_step_and_fused_agree(dtype: str) -> None:
    fused, _ = _run(dtype, by_chance=True)
    eager, _ = _run(dtype, by_chance=True, enforce_eager=True)
    assert fused[0][:4] == eager[0][:4]
