"""Recurra behind lines of JSON, for ``cpu_vs_peers.py``: through ``recurra.LLM``, engine, sampler and all.

python recurra_worker.py CHECKPOINT {float32,bfloat16,float16} THREADS
"""

from __future__ import annotations

import sys
import time
from typing import Any

from lines import PROMPT, make_prompt, serve

import recurra
from recurra import LLM, SamplingParams

MAX_BATCH = 32


class Model:
    """An engine, driven step by step."""

    def __init__(self, path: str, dtype: str, threads: int) -> None:
        llm = LLM(
            path, dtype=dtype, device="cpu", num_threads=threads, max_num_seqs=MAX_BATCH,
            max_num_batched_tokens=2048 + MAX_BATCH, max_model_len=4096,
        )  # fmt: skip
        self.engine = llm.llm_engine
        self.engine.warm_up()
        self.vocab = self.engine.model_config.vocab_size
        self.count = 0

    def _add(self, prompt: list[int], tokens: int, logprobs: int | None = None) -> str:
        self.count += 1
        name = str(self.count)
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        names = [self._add(make_prompt(s, PROMPT, self.vocab), steps + 1) for s in range(batch)]
        started: set[str] = set()
        while len(started) < batch:  # prompts, and the first token of each
            started |= {o.request_id for o in self.engine.step() if o.outputs[0].token_ids}
        start, tokens = time.perf_counter(), []
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.request_id == names[0]:
                    tokens = output.outputs[0].token_ids
        return {"seconds": time.perf_counter() - start, "tokens": list(tokens)}

    def prefill(self, tokens: int) -> dict[str, Any]:
        prompt = make_prompt(0, tokens, self.vocab)
        start = time.perf_counter()
        self._add(prompt, 1)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
        return {"seconds": time.perf_counter() - start, "tokens": list(outputs[-1].outputs[0].token_ids)}

    def greedy(self, prompt: list[int], steps: int) -> dict[str, Any]:
        """Greedy tokens with their log-probabilities, for the gate."""
        self._add(prompt, steps, logprobs=0)
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
        answer = outputs[-1].outputs[0]
        chosen = [p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids, strict=True)]
        return {"tokens": list(answer.token_ids), "logprobs": chosen}

    def operators(self) -> dict[str, Any]:
        """Which backend serves each operator."""
        return {choice.operator: choice.backend for choice in self.engine.ops.choices}


if __name__ == "__main__":
    serve(Model(sys.argv[1], sys.argv[2], int(sys.argv[3])), f"recurra {recurra.__version__}")
