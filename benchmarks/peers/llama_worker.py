"""llama.cpp behind lines of JSON, for ``cpu_vs_peers.py``; runs in the peers' environment.

It calls llama.cpp's C API through ``llama_cpp``'s thin bindings: one ``llama_decode`` and one argmax a step, no
sampler chain, no text. Requests on standard input, one answer a line on standard output:

    {"op": "decode", "batch": 1, "steps": 64}         -> {"seconds": ..., "tokens": [first sequence's tokens]}
    {"op": "prefill", "tokens": 512}                   -> {"seconds": ...}
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Any

import llama_cpp
import numpy as np
from lines import PROMPT, make_prompt, serve

MAX_BATCH = 32


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    pass


class Model:
    """A loaded GGUF file with one context."""

    def __init__(self, path: str, threads: int) -> None:
        llama_cpp.llama_log_set(_silent, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        assert self.model, path
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = 4096 * MAX_BATCH
        params.n_batch = 2048
        params.n_ubatch = 512
        params.n_seq_max = MAX_BATCH
        params.n_threads = params.n_threads_batch = threads
        self.ctx = llama_cpp.llama_init_from_model(self.model, params)
        assert self.ctx, "no context"
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.ctx), True)

    def run(self, rows: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """Compute (token, position, sequence, wants logits) rows; the wanted logits in order."""
        batch, wanted = self.batch, 0
        for i, (token, position, sequence, logits) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = logits
            wanted += logits
        batch.n_tokens = len(rows)
        code = llama_cpp.llama_decode(self.ctx, batch)
        assert code == 0, code
        pointer = llama_cpp.llama_get_logits(self.ctx)
        return np.ctypeslib.as_array(
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (wanted, self.vocab)
        )

    def prompt(self, tokens: list[int], sequence: int) -> int:
        last = len(tokens) - 1
        logits = self.run([(t, i, sequence, i == last) for i, t in enumerate(tokens)])
        return int(logits[0].argmax())

    def decode(self, batch: int, steps: int) -> dict[str, Any]:
        self.clear()
        new = [self.prompt(make_prompt(s, PROMPT, self.vocab), s) for s in range(batch)]
        out = [new[0]]
        start = time.perf_counter()
        for step in range(steps):
            logits = self.run([(new[s], PROMPT + step, s, True) for s in range(batch)])
            new = logits.argmax(-1).tolist()
            out.append(new[0])
        return {"seconds": time.perf_counter() - start, "tokens": out}

    def prefill(self, tokens: int) -> dict[str, Any]:
        self.clear()
        prompt = make_prompt(0, tokens, self.vocab)
        start = time.perf_counter()
        first = self.prompt(prompt, 0)
        return {"seconds": time.perf_counter() - start, "tokens": [first]}


if __name__ == "__main__":
    serve(Model(sys.argv[1], int(sys.argv[2])), f"llama-cpp-python {llama_cpp.__version__}")
