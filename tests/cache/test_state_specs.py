"""State shapes of the layer kinds, and how the pool lays layers of several kinds into one slot."""

from __future__ import annotations

import torch

from recurra.cache.pool import StatePool, slot_bytes
from recurra.cache.spec import delta_state, lightning_state, mamba1_state, mamba2_state, short_conv_state
from recurra.rounding import stochastic

CPU = torch.device("cpu")


def test_sizes_are_those_of_the_shapes() -> None:
    # Qwen3-Next: 16 key and 32 value heads of 128, width 4. MiniMax: 64 heads of 128 x 128. LFM2: 2048, width 3.
    delta = delta_state(16, 32, 128, 128, 4, torch.bfloat16)
    assert [t.shape for t in delta.tensors] == [(8192, 3), (32, 128, 128), (0,)]
    assert delta.nbytes == 8192 * 3 * 2 + 32 * 128 * 128 * 4
    assert lightning_state(64, 128, 128).nbytes == 64 * 128 * 128 * 4
    assert short_conv_state(2048, 3, torch.bfloat16).nbytes == 2048 * 2 * 2


def test_layers_of_every_kind_share_a_slot_and_no_byte() -> None:
    specs = (
        lightning_state(2, 3, 5),
        delta_state(1, 2, 3, 5, 4, torch.bfloat16),
        short_conv_state(7, 3, torch.float16),
        mamba2_state(2, 4, 1, 8, 4, torch.bfloat16),
        mamba2_state(2, 4, 1, 8, 4, torch.bfloat16, torch.int8),
        mamba1_state(6, 8, 4, torch.bfloat16, torch.float8_e4m3fn),
    )
    pool = StatePool(specs, 2, CPU)
    assert pool.bytes_per_slot == slot_bytes(specs)
    shapes = [(layer.conv.shape[1:], layer.ssm.shape[1:]) for layer in pool.layers]
    assert shapes[:3] == [((0,), (2, 3, 5)), ((16, 3), (2, 3, 5)), ((7, 2), (0,))]
    tensors = [t for layer in pool.layers for t in (layer.conv, layer.ssm, layer.scale) if t.numel()]
    for number, tensor in enumerate(tensors):
        tensor[1] = number + 1
    for number, tensor in enumerate(tensors):
        assert (tensor[1].float() == number + 1).all()
        assert (tensor[2].float() == 0).all()


def test_8_bit_states_have_a_scale_for_each_row() -> None:
    eight = mamba2_state(2, 4, 1, 8, 4, torch.bfloat16, torch.int8)
    assert [(t.name, t.shape, t.dtype) for t in eight.tensors[1:]] == [
        ("ssm", (2, 4, 8), torch.int8),
        ("scale", (2, 4), torch.bfloat16),
    ]
    assert mamba1_state(6, 8, 4, torch.bfloat16, torch.float8_e4m3fn).tensors[2].shape == (6,)


def test_every_layer_draws_its_own_and_shares_the_step() -> None:
    specs = (mamba2_state(2, 4, 1, 8, 4, torch.bfloat16, torch.float16),) * 2
    pool = StatePool(specs, 2, CPU, stochastic(3))
    assert [layer.rounding.layer for layer in pool.layers] == [0, 1]
    pool.rounding.advance()
    assert [int(layer.rounding.step) for layer in pool.layers] == [1, 1]
