"""What layers promise beside their arithmetic, which the tests of the models hold against transformers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recurra.cache.pool import StatePool
from recurra.cache.spec import ConvSSM, StateSpec
from recurra.device import detect
from recurra.layers.base import mix
from recurra.layers.dtypes import Dtypes
from recurra.layers.embedding import Embedding, Head
from recurra.layers.mamba1 import Mamba1Sizes, MambaMixer
from recurra.layers.mamba2 import Mamba2Sizes, MambaMixer2
from recurra.layers.norm import RMSNormGated
from recurra.ops import build
from recurra.types import Chunks, ForwardBatch

CPU = torch.device("cpu")
OPS = build(detect("cpu"), "reference")
FLOAT32 = Dtypes(torch.float32, torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("act", "residual_in_fp32", "residual", "recurrence"),
    [
        (torch.bfloat16, True, torch.float32, torch.float32),
        (torch.bfloat16, False, torch.bfloat16, torch.float32),
        (torch.float32, False, torch.float32, torch.float32),
        (torch.float64, True, torch.float64, torch.float64),
    ],
)
def test_formats(
    act: torch.dtype, residual_in_fp32: bool, residual: torch.dtype, recurrence: torch.dtype
) -> None:
    dtypes = Dtypes(torch.bfloat16, act, act, residual_in_fp32=residual_in_fp32)
    assert (dtypes.residual, dtypes.recurrence) == (residual, recurrence)


def test_state_of_a_mamba2_mixer() -> None:
    dtypes = Dtypes(torch.float32, torch.float32, torch.bfloat16, torch.float16)
    mixer = MambaMixer2(Mamba2Sizes(48, 8, 12, 2, 20, 4, 1e-5), ops=OPS, dtypes=dtypes, device=CPU)
    spec = mixer.state_spec()
    assert [(t.name, t.shape, t.dtype) for t in spec.tensors] == [
        ("conv", (8 * 12 + 2 * 2 * 20, 3), torch.bfloat16),
        ("ssm", (8, 12, 20), torch.float16),
        ("scale", (0,), torch.bfloat16),
    ]
    StatePool((spec,), 3, CPU)


def test_state_of_a_mamba_mixer() -> None:
    mixer = MambaMixer(Mamba1Sizes(40, 80, 11, 3, 5), ops=OPS, dtypes=FLOAT32, device=CPU)
    assert [(t.name, t.shape) for t in mixer.state_spec().tensors[:2]] == [
        ("conv", (80, 2)),
        ("ssm", (80, 11)),
    ]


def test_gated_norm_is_by_group() -> None:
    """Groups 2 of 64 columns: scaling one group's input leaves the other's output alone."""
    norm = RMSNormGated(128, 64, 1e-5, ops=OPS, dtypes=FLOAT32, device=CPU)
    norm.weight.data.fill_(1.0)
    x, z = torch.randn(3, 128), torch.randn(3, 128)
    scaled = torch.cat([x[:, :64] * 100, x[:, 64:]], dim=1)
    assert torch.equal(norm(scaled, z)[:, 64:], norm(x, z)[:, 64:])
    gated = (x * torch.nn.functional.silu(z)).double().view(3, 2, 64)
    want = (gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 128)
    torch.testing.assert_close(norm(x, z).double(), want, rtol=1e-6, atol=1e-6)


def test_head_gives_float32() -> None:
    narrow = Dtypes(torch.bfloat16, torch.bfloat16, torch.bfloat16)
    embedding = Embedding(10, 4, dtypes=narrow, device=CPU)
    embedding.weight.data.normal_()
    head = Head(10, 4, tied=embedding, ops=OPS, dtypes=narrow, device=CPU)
    logits = head(torch.randn(2, 4, dtype=torch.bfloat16))
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 10)
    assert head.weight is embedding.weight


class _Recorder:
    """A mixer that marks what each mode was given."""

    def state_spec(self) -> StateSpec:
        return StateSpec("none", ())

    def prefill(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        return x + 100

    def decode(self, x: Tensor, batch: ForwardBatch, state: ConvSSM) -> Tensor:
        return x + 1


@pytest.mark.parametrize(("num_decode", "want"), [(0, [100, 101, 102]), (2, [1, 2, 102]), (3, [1, 2, 3])])
def test_decode_rows_come_first(num_decode: int, want: list[int]) -> None:
    none = torch.empty(0, dtype=torch.int32)
    batch = ForwardBatch(
        torch.zeros(3, dtype=torch.int64), none, none, num_decode, none, none, 0,
        Chunks(4, none, none, none, none), none, none.view(0, 0), none, none, 0,
    )  # fmt: skip
    x = torch.arange(3.0)[:, None]
    assert mix(_Recorder(), x, batch, ConvSSM(x, x)).flatten().tolist() == want
