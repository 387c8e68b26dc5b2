"""The causal convolution on GPUs.

Prefill: a program convolves a tile of BT tokens by BC channels of one kernel chunk, reading the tile
W times through the cache. The program that holds a sequence's first tile is the only one that touches
its window: it reads the old one, then writes the new one, so that tiles need no order among them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.ops.triton_dependent import await_before, launch_options, release
from recurra.ops.triton_math import silu as silu_of
from recurra.types import Chunks

_TOKENS, _CHANNELS, _UPDATE_CHANNELS = 32, 128, 256


@triton.jit(
    do_not_specialize_on_alignment=[
        "cu_seqlens",
        "slots",
        "has_state",
        "chunk_seq",
        "chunk_start",
        "chunk_length",
    ]
)
def _varlen_kernel(
    x,
    weight,
    bias,
    state,
    out,
    cu_seqlens,
    slots,
    has_state,
    chunk_seq,
    chunk_start,
    chunk_length,
    x_row,
    weight_row,
    state_slot,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILES: tl.constexpr,  # tiles of a chunk
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    channel_blocks: tl.constexpr = (CHANNELS + BC - 1) // BC
    pid = tl.program_id(0)
    c = (pid % channel_blocks) * BC + tl.arange(0, BC)
    tile = (pid // channel_blocks) % TILES
    chunk = pid // (channel_blocks * TILES)
    length = tl.load(chunk_length + chunk)
    if tile * BT >= length:
        return
    seq = tl.load(chunk_seq + chunk)
    begin = tl.load(cu_seqlens + seq).to(tl.int64)
    first_row = tl.load(chunk_start + chunk).to(tl.int64) + tile * BT
    t = tl.arange(0, BT)
    c_ok = c < CHANNELS
    ok = (tile * BT + t < length)[:, None] & c_ok[None, :]
    # 64-bit offsets stay scalar: inside a tile 32 bits suffice, at half the registers.
    here = x + first_row * x_row
    inner = t[:, None] * x_row + c[None, :]
    place = (first_row - begin).to(tl.int32) + t  # in the sequence
    acc = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        inside = (place >= back)[:, None]
        u = tl.load(here + (inner - back * x_row), mask=ok & inside, other=0.0)
        w = tl.load(weight + c * weight_row + j, mask=c_ok, other=0.0)
        acc += u.to(tl.float32) * w.to(tl.float32)[None, :]

    if first_row == begin:
        kept = tl.load(has_state + seq).to(tl.int1)
        slot = tl.load(slots + seq).to(tl.int64)
        window = state + slot * state_slot + c * (W - 1)
        for j in tl.static_range(W):
            position = t + j  # in the window, of the input that tap j of row t reads
            in_window = (position < W - 1)[:, None]
            kept_input = tl.load(window[None, :] + position[:, None], mask=ok & in_window & kept, other=0.0)
            tap = tl.load(weight + c * weight_row + j, mask=c_ok, other=0.0)
            acc += kept_input.to(tl.float32) * tap.to(tl.float32)[None, :]
        end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
        i = tl.arange(0, WP)
        source = end - (W - 1) + i
        fresh = (source >= begin)[None, :] & c_ok[:, None]
        wanted = (i < W - 1)[None, :] & c_ok[:, None]
        new = tl.load(x + source[None, :] * x_row + c[:, None], mask=wanted & fresh, other=0.0)
        left = i + (end - begin)  # where the old window holds what moves to place i
        stale = (left < W - 1)[None, :] & c_ok[:, None] & kept
        old = tl.load(window[:, None] + left[None, :], mask=stale, other=0.0)
        value = tl.where(fresh, new.to(tl.float32), old.to(tl.float32))
        # Other threads of this program may still be reading what is overwritten here.
        tl.debug_barrier()
        tl.store(window[:, None] + i[None, :], value.to(state.dtype.element_ty), mask=wanted)

    if HAS_BIAS:
        acc += tl.load(bias + c, mask=c_ok, other=0.0).to(tl.float32)[None, :]
    if SILU:
        acc = silu_of(acc)
    y_at = out + first_row * CHANNELS
    tl.store(y_at + (t[:, None] * CHANNELS + c[None, :]), acc.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _update_kernel(
    x,
    weight,
    bias,
    state,
    out,
    slots,
    x_row,
    weight_row,
    state_slot,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    SILU: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BC: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    release(DEPENDENT)
    await_before(DEPENDENT)
    channel_blocks: tl.constexpr = (CHANNELS + BC - 1) // BC
    pid = tl.program_id(0)
    c = (pid % channel_blocks) * BC + tl.arange(0, BC)
    row = (pid // channel_blocks).to(tl.int64)
    c_ok = c < CHANNELS
    slot = tl.load(slots + row).to(tl.int64)
    if slot == 0:
        tl.store(out + row * CHANNELS + c, tl.zeros((BC,), out.dtype.element_ty), mask=c_ok)
        return
    j = tl.arange(0, WP)
    window = state + slot * state_slot + c[:, None] * (W - 1)
    stored = c_ok[:, None] & (j < W - 1)[None, :]
    old = tl.load(window + j[None, :], mask=stored, other=0.0).to(tl.float32)
    new = tl.load(x + row * x_row + c, mask=c_ok, other=0.0).to(tl.float32)
    u = tl.where((j == W - 1)[None, :], new[:, None], old)
    taps = c_ok[:, None] & (j < W)[None, :]
    w = tl.load(weight + c[:, None] * weight_row + j[None, :], mask=taps, other=0.0)
    y = tl.sum(u * w.to(tl.float32), axis=1)
    if HAS_BIAS:
        y += tl.load(bias + c, mask=c_ok, other=0.0).to(tl.float32)
    if SILU:
        y = silu_of(y)
    tl.store(out + row * CHANNELS + c, y.to(out.dtype.element_ty), mask=c_ok)
    # Neighbouring threads hold neighbouring taps: all must have read before any moves one place left.
    tl.debug_barrier()
    moved = taps & (j > 0)[None, :]
    tl.store(window + j[None, :] - 1, u.to(state.dtype.element_ty), mask=moved)


def _check(x: Tensor, weight: Tensor, conv_state: Tensor) -> None:
    channels, width = weight.shape
    assert 2 <= width <= 5, f"conv width {width}: 2 to 5 are supported"
    assert conv_state.shape[1:] == (channels, width - 1), (conv_state.shape, weight.shape)
    assert conv_state.stride()[1:] == (width - 1, 1), f"strides {conv_state.stride()}: dense windows needed"
    assert x.shape[1] == channels, (x.shape, weight.shape)
    assert x.stride(1) == 1, f"strides {x.stride()}: unit channel stride needed"
    assert weight.stride(1) == 1, f"strides {weight.stride()}: unit tap stride needed"


def causal_conv1d_varlen(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
    *,
    silu: bool,
) -> Tensor:
    """See :class:`recurra.ops.conv1d.CausalConv1dVarlen`."""
    _check(x, weight, conv_state)
    tokens, channels = x.shape
    width = weight.shape[1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    num_chunks = chunks.seq.shape[0]
    if num_chunks == 0:
        return out
    tiles = triton.cdiv(chunks.size, _TOKENS)
    grid = (num_chunks * tiles * triton.cdiv(channels, _CHANNELS),)
    with torch.cuda.device_of(x):
        _varlen_kernel[grid](
            x, weight, bias if bias is not None else weight, conv_state, out, cu_seqlens, slots, has_state,
            chunks.seq, chunks.start, chunks.length, x.stride(0), weight.stride(0), conv_state.stride(0),
            CHANNELS=channels, W=width, WP=triton.next_power_of_2(width - 1), SILU=silu,
            HAS_BIAS=bias is not None, TILES=tiles, BT=_TOKENS, BC=_CHANNELS, num_warps=4,
        )  # fmt: skip
    return out


def causal_conv1d_update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    *,
    silu: bool,
) -> Tensor:
    """See :class:`recurra.ops.conv1d.CausalConv1dUpdate`. The output of padding rows is zero."""
    _check(x, weight, conv_state)
    rows, channels = x.shape
    width = weight.shape[1]
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    grid = (rows * triton.cdiv(channels, _UPDATE_CHANNELS),)
    with torch.cuda.device_of(x):
        _update_kernel[grid](
            x, weight, bias if bias is not None else weight, conv_state, out, slots,
            x.stride(0), weight.stride(0), conv_state.stride(0),
            CHANNELS=channels, W=width, WP=triton.next_power_of_2(width), SILU=silu,
            HAS_BIAS=bias is not None, BC=_UPDATE_CHANNELS, num_warps=4,
            **launch_options(x.device),
        )  # fmt: skip
    return out
