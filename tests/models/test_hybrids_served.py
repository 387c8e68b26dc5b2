"""Each hybrid family through ``LLM.generate``: pieces of prompts, requests side by side, and pages that run out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hybrid_cases import find_cases
from model_cases import TOLERANCE

import checkpoints
from recurra import LLM, SamplingParams

#: The first case of each family's file; variants differ in layers, not in how they are served.
CASES = {name: case for name, case in find_cases().items() if "-" not in name}
LENGTHS, ANSWER = (5, 41, 90, 1, 17), 12


@pytest.mark.parametrize("name", CASES)
def test_served(name: str, tmp_path: Path) -> None:
    """Greedy answers and the prompt's log-probs are those of a plain forward, with pages for a third of all tokens."""
    case = CASES[name]
    folder = case.write(tmp_path / "model")
    llm = LLM(
        str(folder), skip_tokenizer_init=True, max_num_batched_tokens=32, max_num_seqs=4, block_size=8,
        num_kv_pages=16, enable_prefix_caching=False, num_threads=1,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    vocabulary = min(llm.llm_engine.model_config.vocab_size, checkpoints.VOCABULARY)
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in LENGTHS]
    sampling = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, prompt_logprobs=0)
    answer = case.answer(folder, torch.float32)
    for prompt, output in zip(prompts, llm.generate(prompts, sampling, use_tqdm=False), strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == ANSWER
        want = answer(prompt + tokens)[:-1]
        chosen = want.gather(-1, torch.tensor((prompt + tokens)[1:])[:, None])[:, 0]
        best = want[len(prompt) - 1 :].max(-1).values
        assert (best - chosen[len(prompt) - 1 :]).max() <= 2 * TOLERANCE
        assert output.prompt_logprobs is not None
        for position, token in enumerate(prompt[1:], 1):
            row = output.prompt_logprobs[position]
            assert row is not None
            assert row[token].logprob == pytest.approx(chosen[position - 1].item(), abs=TOLERANCE)
