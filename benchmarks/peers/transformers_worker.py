"""``transformers`` behind lines of JSON, for ``cpu_vs_peers.py``: its own classes, eager, as it comes from PyPI.

    python transformers_worker.py CHECKPOINT {float32,bfloat16} THREADS [ROUND]

ROUND (bfloat16 or float16) rounds the weights and widens them again: the float32 judge of narrower weights.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from lines import PROMPT, make_prompt, serve


class Model:
    """A causal language model with greedy loops around it."""

    def __init__(self, path: str, dtype: str, threads: int, rounding: str | None) -> None:
        transformers.logging.set_verbosity_error()
        torch.set_num_threads(threads)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()
        if rounding is not None:
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if parameter.dim() > 1 and "conv1d" not in name and "A_log" not in name:
                        parameter.copy_(parameter.to(getattr(torch, rounding)).float())
        self.vocab = self.model.config.vocab_size

    def _step(self, tokens: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        with torch.inference_mode():
            out = self.model(tokens, cache=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.cache

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        prompts = torch.tensor([make_prompt(s, PROMPT, self.vocab) for s in range(batch)])
        tokens, cache = self._step(prompts, None)
        out = [int(tokens[0])]
        start = time.perf_counter()
        for _ in range(steps):
            tokens, cache = self._step(tokens, cache)
            out.append(int(tokens[0]))
        return {"seconds": time.perf_counter() - start, "tokens": out}

    def prefill(self, tokens: int) -> dict[str, Any]:
        prompt = torch.tensor([make_prompt(0, tokens, self.vocab)])
        start = time.perf_counter()
        first, _ = self._step(prompt, None)
        return {"seconds": time.perf_counter() - start, "tokens": [int(first)]}

    def logprobs(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        """Log-probability of each token after the prompt and those before it, and the best there."""
        ids = torch.tensor([prompt + tokens[:-1]])
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0].double()
        scores = logits.log_softmax(-1)
        chosen = scores[torch.arange(len(tokens)), torch.tensor(tokens)]
        return {"chosen": chosen.tolist(), "best": scores.argmax(-1).tolist()}


if __name__ == "__main__":
    path, dtype, threads, *rounding = sys.argv[1:]
    model = Model(path, dtype, int(threads), rounding[0] if rounding else None)
    serve(model, f"transformers {transformers.__version__}, torch {torch.__version__}")
