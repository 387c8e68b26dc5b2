"""The recurrent block against transformers' own: whole, cut anywhere, and token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.device import detect
from recurra.layers.dtypes import Dtypes
from recurra.layers.rg_lru import RGLRUMixer, RGLRUSizes, negative_softplus_8
from recurra.ops import build
from recurra.types import Chunks, ForwardBatch

CPU, HIDDEN, CHANNELS, BLOCKS, T = torch.device("cpu"), 24, 32, 4, 70
SLOT = 2


def _block() -> Any:
    import transformers as hf
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRecurrentBlock

    config = hf.RecurrentGemmaConfig(hidden_size=HIDDEN, lru_width=CHANNELS, num_attention_heads=BLOCKS)
    block = RecurrentGemmaRecurrentBlock(config, 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            fan = parameter.shape[-1] if "conv" not in name else 1 / 8
            parameter.copy_(torch.randn(parameter.shape) * (fan**-0.5 if parameter.dim() > 1 else 0.5))
        block.rg_lru.recurrent_param.uniform_(-6.0, 0.5)
    return block


def _mixer(block: Any, backend: str) -> RGLRUMixer:
    dtypes = Dtypes(torch.float32, torch.float32, torch.float32)
    sizes = RGLRUSizes(HIDDEN, CHANNELS, BLOCKS, 4)
    mixer = RGLRUMixer(sizes, ops=build(detect("cpu"), backend=backend), dtypes=dtypes, device=CPU)
    stored = dict(block.named_parameters())
    mixer.load_state_dict({
        "in_proj.weight": torch.cat((stored["linear_y.weight"], stored["linear_x.weight"])),
        "in_proj.bias": torch.cat((stored["linear_y.bias"], stored["linear_x.bias"])),
        "conv1d.weight": stored["conv_1d.weight"].squeeze(1),
        "conv1d.bias": stored["conv_1d.bias"],
        "input_gate.weight": stored["rg_lru.input_gate_weight"],
        "input_gate.bias": stored["rg_lru.input_gate_bias"],
        "recurrent_gate.weight": stored["rg_lru.recurrent_gate_weight"],
        "recurrent_gate.bias": stored["rg_lru.recurrent_gate_bias"],
        "log_decay": negative_softplus_8(stored["rg_lru.recurrent_param"]),
        "out_proj.weight": stored["linear_out.weight"],
        "out_proj.bias": stored["linear_out.bias"],
    })  # fmt: skip
    return mixer


def _batch(tokens: int, start: int, decode: bool) -> ForwardBatch:
    def ints(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    none = ints()
    return ForwardBatch(
        token_ids=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(start, start + tokens),
        slots=ints(SLOT),
        num_decode=int(decode),
        cu_seqlens=ints(0) if decode else ints(0, tokens),
        has_state=torch.tensor([] if decode else [start > 0], dtype=torch.bool),
        max_seqlen=0 if decode else tokens,
        chunks=Chunks(64, none, none, none, ints(0)),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        page_table=torch.zeros(1, 0, dtype=torch.int32),
        context_lens=ints(start + tokens),
        kv_rows=torch.zeros(0, dtype=torch.int64),
        max_context=start + tokens,
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("cuts", "decoded"), [((), 0), ((1,), 0), ((3, 64), 0), ((65,), 4), ((1,), 69)], ids=str
)
def test_as_transformers_computes_it(backend: str, cuts: tuple[int, ...], decoded: int) -> None:
    block = _block()
    mixer = _mixer(block, backend)
    x = torch.randn(T, HIDDEN)
    pool = StatePool((mixer.state_spec(),), 3, CPU)
    pool.rows.fill_(0xFF)
    state, parts = pool.layers[0], []
    with torch.no_grad():
        # In float64, because it subtracts a^2 from 1, which leaves few digits in float32 where a is almost 1.
        want, _ = block.double()(x[None].double(), torch.arange(T)[None], None, use_cache=False)
        for begin, end in pairwise((0, *cuts, T - decoded if decoded < 69 else T)):
            if decoded == 69 and begin == 1:
                continue
            parts.append(mixer.prefill(x[begin:end], _batch(end - begin, begin, False), state))
        for t in range(T - decoded, T):
            parts.append(mixer.decode(x[t : t + 1], _batch(1, t, True), state))
    torch.testing.assert_close(torch.cat(parts), want[0].float(), rtol=1e-4, atol=1e-5)
