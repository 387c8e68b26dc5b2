"""The gated short convolution on GPUs, gates and convolution in one pass.

The tiling is that of :mod:`recurra.ops.conv1d.triton`: a program computes BT tokens by BC channels of one
kernel chunk, and the one that holds a sequence's first tile alone touches the window.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from recurra.types import Chunks

_TOKENS, _CHANNELS, _UPDATE_CHANNELS = 32, 128, 256


@triton.jit
def _gated(x, B, x_at, b_at, ok):
    """``B * x``, rounded to x's dtype as the window keeps it, in float32; zeros under the mask."""
    left = tl.load(x + x_at, mask=ok, other=0.0)
    product = left.to(tl.float32) * tl.load(B + b_at, mask=ok, other=0.0).to(tl.float32)
    return product.to(left.dtype).to(tl.float32)


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
    B,
    C,
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
    b_row,
    c_row,
    weight_row,
    state_slot,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
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
    place = (first_row - begin).to(tl.int32) + t  # in the sequence
    x_at, b_at = x + first_row * x_row, B + first_row * b_row
    acc = tl.zeros((BT, BC), tl.float32)
    for j in tl.static_range(W):
        back = W - 1 - j
        inside = ok & (place >= back)[:, None]
        row = (t - back)[:, None]
        u = _gated(x_at, b_at, row * x_row + c[None, :], row * b_row + c[None, :], inside)
        w = tl.load(weight + c * weight_row + j, mask=c_ok, other=0.0)
        acc += u * w.to(tl.float32)[None, :]

    if first_row == begin:
        kept = tl.load(has_state + seq).to(tl.int1)
        slot = tl.load(slots + seq).to(tl.int64)
        window = state + slot * state_slot + c * (W - 1)
        for j in tl.static_range(W):
            position = t + j  # in the window, of the input that tap j of row t reads
            in_window = (position < W - 1)[:, None]
            held = tl.load(window[None, :] + position[:, None], mask=ok & in_window & kept, other=0.0)
            w = tl.load(weight + c * weight_row + j, mask=c_ok, other=0.0)
            acc += held.to(tl.float32) * w.to(tl.float32)[None, :]
        end = tl.load(cu_seqlens + seq + 1).to(tl.int64)
        i = tl.arange(0, WP)
        source = (end - (W - 1) + i)[None, :]
        wanted = (i < W - 1)[None, :] & c_ok[:, None]
        fresh = source >= begin
        new = _gated(x, B, source * x_row + c[:, None], source * b_row + c[:, None], wanted & fresh)
        left = i + (end - begin)  # where the old window holds what moves to place i
        stale = (left < W - 1)[None, :] & c_ok[:, None] & kept
        old = tl.load(window[:, None] + left[None, :], mask=stale, other=0.0)
        value = tl.where(fresh, new, old.to(tl.float32))
        # Other threads of this program may still be reading what is overwritten here.
        tl.debug_barrier()
        tl.store(window[:, None] + i[None, :], value.to(state.dtype.element_ty), mask=wanted)

    if HAS_BIAS:
        acc += tl.load(bias + c, mask=c_ok, other=0.0).to(tl.float32)[None, :]
    acc *= tl.load(C + first_row * c_row + (t[:, None] * c_row + c[None, :]), mask=ok, other=0.0).to(
        tl.float32
    )
    y_at = out + first_row * CHANNELS
    tl.store(y_at + (t[:, None] * CHANNELS + c[None, :]), acc.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _update_kernel(
    x,
    B,
    C,
    weight,
    bias,
    state,
    out,
    slots,
    x_row,
    b_row,
    c_row,
    weight_row,
    state_slot,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
    WP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BC: tl.constexpr,
):
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
    new = _gated(x, B, row * x_row + c, row * b_row + c, c_ok)
    u = tl.where((j == W - 1)[None, :], new[:, None], old)
    taps = c_ok[:, None] & (j < W)[None, :]
    w = tl.load(weight + c[:, None] * weight_row + j[None, :], mask=taps, other=0.0)
    y = tl.sum(u * w.to(tl.float32), axis=1)
    if HAS_BIAS:
        y += tl.load(bias + c, mask=c_ok, other=0.0).to(tl.float32)
    y *= tl.load(C + row * c_row + c, mask=c_ok, other=0.0).to(tl.float32)
    tl.store(out + row * CHANNELS + c, y.to(out.dtype.element_ty), mask=c_ok)
    # Neighbouring threads hold neighbouring taps: all must have read before any moves one place left.
    tl.debug_barrier()
    tl.store(window + j[None, :] - 1, u.to(state.dtype.element_ty), mask=taps & (j > 0)[None, :])


def _check(x: Tensor, B: Tensor, C: Tensor, weight: Tensor, conv_state: Tensor) -> None:
    channels, width = weight.shape
    assert 2 <= width <= 5, f"conv width {width}: 2 to 5 are supported"
    assert conv_state.shape[1:] == (channels, width - 1), (conv_state.shape, weight.shape)
    assert conv_state.stride()[1:] == (width - 1, 1), f"strides {conv_state.stride()}: dense windows needed"
    assert weight.stride(1) == 1, f"strides {weight.stride()}: unit tap stride needed"
    for name, tensor in (("x", x), ("B", B), ("C", C)):
        assert tensor.shape == (x.shape[0], channels), (name, tensor.shape, weight.shape)
        assert tensor.dtype == x.dtype, f"{name} is {tensor.dtype}, x is {x.dtype}"
        assert tensor.stride(1) == 1, f"{name} strides {tensor.stride()}: unit channel stride needed"


def short_conv_varlen(
    x: Tensor,
    B: Tensor,
    C: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state: Tensor,
    cu_seqlens: Tensor,
    slots: Tensor,
    has_state: Tensor,
    chunks: Chunks,
) -> Tensor:
    """See :class:`recurra.ops.short_conv.ShortConvVarlen`."""
    _check(x, B, C, weight, conv_state)
    tokens, channels = x.shape
    width = weight.shape[1]
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    num_chunks = chunks.seq.shape[0]
    if num_chunks == 0:
        return out
    tiles = triton.cdiv(chunks.size, _TOKENS)
    with torch.cuda.device_of(x):
        _varlen_kernel[(num_chunks * tiles * triton.cdiv(channels, _CHANNELS),)](
            x, B, C, weight, weight if bias is None else bias, conv_state, out, cu_seqlens, slots, has_state,
            chunks.seq, chunks.start, chunks.length, x.stride(0), B.stride(0), C.stride(0), weight.stride(0),
            conv_state.stride(0),
            CHANNELS=channels, W=width, WP=triton.next_power_of_2(width - 1), HAS_BIAS=bias is not None,
            TILES=tiles, BT=_TOKENS, BC=_CHANNELS, num_warps=4,
        )  # fmt: skip
    return out


def short_conv_update(
    x: Tensor, B: Tensor, C: Tensor, weight: Tensor, bias: Tensor | None, conv_state: Tensor, slots: Tensor
) -> Tensor:
    """See :class:`recurra.ops.short_conv.ShortConvUpdate`. The output of padding rows is zero."""
    _check(x, B, C, weight, conv_state)
    rows, channels = x.shape
    width = weight.shape[1]
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    with torch.cuda.device_of(x):
        _update_kernel[(rows * triton.cdiv(channels, _UPDATE_CHANNELS),)](
            x, B, C, weight, weight if bias is None else bias, conv_state, out, slots,
            x.stride(0), B.stride(0), C.stride(0), weight.stride(0), conv_state.stride(0),
            CHANNELS=channels, W=width, WP=triton.next_power_of_2(width), HAS_BIAS=bias is not None,
            BC=_UPDATE_CHANNELS, num_warps=4,
        )  # fmt: skip
    return out
