"""Time the GPU operators by CUDA-graph replay, beside the copy rate measured in the same run.

Every row is first held against the float64 definition (or, for long scans, against the same operator in
float32); a row that is wrong is not timed. Writes benchmarks/results/kernels-<machine>.json.

    python benchmarks/kernels.py --out benchmarks/results/kernels-h200.json --commit "$(git rev-parse HEAD)"
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from recurra.ops.conv1d import reference as conv_reference
from recurra.ops.conv1d import triton as conv
from recurra.ops.norm import reference as norm_reference
from recurra.ops.norm import triton as norm
from recurra.ops.replay import triton as replay
from recurra.ops.rounding import NEAREST, SCALE_DTYPE, SCALED, stochastic
from recurra.ops.rounding import reference as rounding_reference
from recurra.ops.ssm import reference, triton_scan, triton_ssd, triton_update
from recurra.ring import Ring
from recurra.rounding import Rounding
from recurra.types import Chunks

GPU = torch.device("cuda")
H, P, N, G, W = 128, 64, 128, 8, 4
CHANNELS = H * P + 2 * G * N


def median_us(call: Callable[[], Any], replays: int = 25) -> float:
    """Median time of a graph replay; the graph holds enough calls to pass 200 us."""
    call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    calls = max(1, min(20, int(0.4 / max(begin.elapsed_time(end), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(replays + 3):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[3:])


def eager_us(call: Callable[[], Any]) -> float:
    """Median time of one call between two events: for work far longer than a launch."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(13):
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[3:])


def copy_rate() -> float:
    """TB/s of a copy of 4 GB, bytes read plus bytes written."""
    source, target = (torch.empty(2**30, dtype=torch.float32, device=GPU).normal_() for _ in range(2))
    return 2 * source.nbytes / eager_us(lambda: target.copy_(source)) / 1e6


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact.double()).norm() / exact.double().norm())


def cut(lengths: list[int], size: int) -> tuple[Tensor, Chunks]:
    """cu_seqlens and chunks of packed sequences."""
    seq, start, length, cu, edges = [], [], [], [0], [0]
    for s, tokens in enumerate(lengths):
        for at in range(0, tokens, size):
            seq.append(s)
            start.append(edges[-1] + at)
            length.append(min(size, tokens - at))
        edges.append(edges[-1] + tokens)
        cu.append(len(seq))
    chunks = Chunks(size, *(torch.tensor(v, dtype=torch.int32, device=GPU) for v in (seq, start, length, cu)))
    return torch.tensor(edges, dtype=torch.int32, device=GPU), chunks


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=GPU, dtype=torch.float32).to(dtype)


def format_rows() -> Iterator[dict[str, Any]]:
    """Selective state update, Mamba-2, at every state format, to nearest and by chance."""
    A, bias, D = -torch.rand(H, device=GPU) - 0.02, torch.rand(H, device=GPU) - 4, torch.randn(H, device=GPU)
    formats = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8)
    cases = [(f, NEAREST) for f in formats] + [(f, stochastic(1, GPU)) for f in formats[1:]]
    cases += [(torch.float16, stochastic(1, GPU, rounds)) for rounds in (4, 5, 10)]
    for S in (1, 32, 512):
        slots = torch.randperm(S, device=GPU).int() + 1
        x, z, dt, B, C = randn(S, H, P), randn(S, H, P), randn(S, H), randn(S, G, N), randn(S, G, N)
        few = min(S, 4)
        near = torch.arange(few, device=GPU, dtype=torch.int32)
        for kept, rounding in cases:
            pool = torch.zeros(S + 1, H, P, N, device=GPU).to(kept)
            scale = torch.zeros(S + 1, H, P, device=GPU, dtype=SCALE_DTYPE)
            for at in range(0, S, 64):
                part = slots[at : at + 64]
                rounding_reference.store(
                    pool, scale, part, randn(len(part), H, P, N, dtype=torch.float32), NEAREST
                )
            start = rounding_reference.load(
                pool, scale if kept in SCALED else None, slots[:few], torch.float64
            )
            wide = [t[:few].double() for t in (x, dt, B, C, z)]
            exact = reference.selective_state_update(
                start,
                wide[0],
                wide[1],
                A.double(),
                wide[2],
                wide[3],
                D.double(),
                wide[4],
                bias.double(),
                near,
            )

            def call(
                pool=pool, scale=scale, rounding=rounding, x=x, dt=dt, B=B, C=C, z=z, slots=slots
            ) -> Tensor:  # type: ignore[no-untyped-def]
                return triton_update.selective_state_update(
                    pool, x, dt, A, B, C, D, z, bias, slots, state_scale=scale, rounding=rounding
                )

            wrong = error(call()[:few], exact)
            bits = kept.itemsize * N + (SCALE_DTYPE.itemsize if kept in SCALED else 0)
            how = f", {rounding.rounds} rounds" if rounding.stochastic else ""
            yield {
                "work": "selective_state_update by format", "shape": f"S={S} H={H} P={P} N={N} G={G}",
                "dtype": f"bf16, state {str(kept)[6:]} {rounding.mode}{how}", "us": median_us(call),
                "bytes": S * (2 * H * P * bits + 2 * (3 * H * P + H + 2 * G * N)), "ops": S * H * P * N * 5,
                "error": wrong,
            }  # fmt: skip


def update_rows() -> Iterator[dict[str, Any]]:
    """Selective state update, Mamba-2 at fp32 and fp16 states and Mamba-1."""
    A, bias, D = -torch.rand(H, device=GPU) - 0.02, torch.rand(H, device=GPU) - 4, torch.randn(H, device=GPU)
    for state_dtype in (torch.float32, torch.float16):
        for S in (1, 8, 32, 128, 512):
            slots = torch.randperm(S, device=GPU).int() + 1
            pool = randn(S + 1, H, P, N, dtype=state_dtype)
            x, z, dt, B, C = randn(S, H, P), randn(S, H, P), randn(S, H), randn(S, G, N), randn(S, G, N)
            few = min(S, 8)
            start = torch.cat([pool[:1], pool[slots[:few].long()]]).double()
            wide = [t[:few].double() for t in (x, dt, B, C, z)]
            near = torch.arange(1, few + 1, device=GPU, dtype=torch.int32)
            exact = reference.selective_state_update(
                start,
                wide[0],
                wide[1],
                A.double(),
                wide[2],
                wide[3],
                D.double(),
                wide[4],
                bias.double(),
                near,
            )

            def call(pool=pool, x=x, dt=dt, B=B, C=C, z=z, slots=slots) -> Tensor:  # type: ignore[no-untyped-def]
                return triton_update.selective_state_update(pool, x, dt, A, B, C, D, z, bias, slots)

            wrong = error(call()[:few], exact)
            nbytes = S * (2 * H * P * N * state_dtype.itemsize + 2 * (3 * H * P + H + 2 * G * N))
            yield {
                "work": "selective_state_update", "shape": f"S={S} H={H} P={P} N={N} G={G}",
                "dtype": f"bf16, state {str(state_dtype)[6:]}", "us": median_us(call), "bytes": nbytes,
                "ops": S * H * P * N * 5, "error": wrong,
            }  # fmt: skip
    dim, size = 8192, 16
    A1, bias1 = -torch.rand(dim, size, device=GPU) - 0.02, torch.rand(dim, device=GPU) - 4
    D1 = torch.randn(dim, device=GPU)
    for S in (1, 32, 128, 512):
        slots = torch.randperm(S, device=GPU).int() + 1
        pool = randn(S + 1, dim, size, dtype=torch.float32)
        x, z, dt, B, C = randn(S, dim), randn(S, dim), randn(S, dim), randn(S, size), randn(S, size)
        start = pool.double()
        wide = [t.double() for t in (x, dt, B, C, z)]
        exact = reference.selective_state_update(
            start,
            wide[0],
            wide[1],
            A1.double(),
            wide[2],
            wide[3],
            D1.double(),
            wide[4],
            bias1.double(),
            slots,
        )

        def call1(pool=pool, x=x, dt=dt, B=B, C=C, z=z, slots=slots) -> Tensor:  # type: ignore[no-untyped-def]
            return triton_update.selective_state_update(pool, x, dt, A1, B, C, D1, z, bias1, slots)

        wrong = error(call1(), exact)
        nbytes = S * (2 * dim * size * 4 + 2 * (4 * dim + 2 * size)) + dim * size * 4
        yield {
            "work": "selective_state_update (Mamba-1)", "shape": f"S={S} dim={dim} N={size}", "dtype": "bf16, state float32",
            "us": median_us(call1), "bytes": nbytes, "ops": S * dim * size * 6, "error": wrong,
        }  # fmt: skip


def ring_us(call: Callable[[], Any], steps: int, replays: int = 15) -> float:
    """Median time of a step over graph replays of ``steps`` steps each, which is a ring's whole cycle."""
    for _ in range(steps):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            call()
    times = []
    for _ in range(replays + 3):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / steps)
    return statistics.median(times[3:])


REPLAY_FORMATS = (torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8)
REPLAY_LENGTH = 16


@dataclass(frozen=True)
class ReplayCase:
    """Checkpoints, empty rings and a step's inputs."""

    pool: Tensor
    scale: Tensor
    ring: Ring
    slots: Tensor
    inputs: tuple[Tensor, ...]  # x, dt, A, B, C, D, z, dt_bias
    rounding: Rounding

    @classmethod
    def draw(cls, S: int, kept: torch.dtype, rounding: Rounding) -> ReplayCase:
        pool = torch.zeros(S + 1, H, P, N, device=GPU).to(kept)
        scale = torch.zeros(S + 1, H, P, device=GPU, dtype=SCALE_DTYPE)
        slots, places = torch.randperm(S, device=GPU).int() + 1, REPLAY_LENGTH + 1
        for at in range(0, S, 64):
            part = slots[at : at + 64]
            rounding_reference.store(
                pool, scale, part, randn(len(part), H, P, N, dtype=torch.float32), NEAREST
            )
        ring = Ring(
            torch.zeros(S + 1, places, H, P, device=GPU, dtype=torch.bfloat16),
            torch.zeros(S + 1, places, H, device=GPU),
            torch.zeros(S + 1, places, G, N, device=GPU, dtype=torch.bfloat16),
            torch.zeros(S + 1, G, 2, device=GPU, dtype=torch.int32),
        )
        A, bias, D = (
            -torch.rand(H, device=GPU) - 0.02,
            torch.rand(H, device=GPU) - 4,
            torch.randn(H, device=GPU),
        )
        inputs = (
            randn(S, H, P),
            randn(S, H),
            A,
            randn(S, G, N),
            randn(S, G, N),
            D,
            randn(S, H, P),
            bias,
        )
        return cls(pool, scale, ring, slots, inputs, rounding)

    def step(self) -> Tensor:
        return replay.replay_state_update(
            self.pool, self.ring, *self.inputs, self.slots, state_scale=self.scale, rounding=self.rounding
        )

    def spread(self) -> None:
        """Rows at every phase of the ring, as when sequences come and go."""
        self.ring.at[:, :, 1] = (torch.arange(len(self.slots) + 1, device=GPU) % REPLAY_LENGTH + 1)[:, None]

    def wrong(self) -> float:
        """Error of ten steps of a few rows before any fold, against the plain update in float64."""
        few = self.slots[:4]
        x, dt, A, B, C, D, z, bias = self.inputs
        wide = [t[:4].double() for t in (x, dt, B, C, z)]
        scale = self.scale if self.pool.dtype in SCALED else None
        state = rounding_reference.load(self.pool, scale, few, torch.float64)
        near, worst = torch.arange(len(few), device=GPU, dtype=torch.int32), 0.0
        for _ in range(10):
            exact = reference.selective_state_update(
                state,
                wide[0],
                wide[1],
                A.double(),
                wide[2],
                wide[3],
                D.double(),
                wide[4],
                bias.double(),
                near,
            )
            worst = max(worst, error(self.step()[:4], exact))
        return worst


def replay_rows() -> Iterator[dict[str, Any]]:
    """Replay decode, mean of a step over the ring: sequences at every phase, and all at one."""
    cases = [(f, NEAREST) for f in REPLAY_FORMATS]
    cases += [(f, stochastic(1, GPU)) for f in (torch.float16, torch.int8)]
    for S in (512, 32, 1):
        for kept, rounding in cases:
            case = ReplayCase.draw(S, kept, rounding)
            wrong = case.wrong()
            bits = kept.itemsize * N + (SCALE_DTYPE.itemsize if kept in SCALED else 0)
            entry = 2 * H * P + 4 * H + 2 * G * N  # of the ring
            # A step reads the checkpoint and half a ring, and a fold reads the rest and writes, once in a ring.
            ring_bytes = (
                entry * (REPLAY_LENGTH - 1) / 2
                + entry
                + (H * P * bits + REPLAY_LENGTH * entry) / REPLAY_LENGTH
            )
            nbytes = S * (H * P * bits + ring_bytes + 2 * (3 * H * P + H + 2 * G * N))
            for phases in ("spread", "aligned") if S > 1 else ("aligned",):
                case.ring.at.zero_()
                if phases == "spread":
                    case.spread()
                yield {
                    "work": f"replay_state_update, {phases} phases", "shape": f"S={S} H={H} P={P} N={N} G={G} L={REPLAY_LENGTH}",
                    "dtype": f"bf16, state {str(kept)[6:]} {rounding.mode}", "us": ring_us(case.step, REPLAY_LENGTH),
                    "bytes": int(nbytes), "ops": S * H * P * (2 * N + 2 * REPLAY_LENGTH), "error": wrong,
                }  # fmt: skip


def scan_rows() -> Iterator[dict[str, Any]]:
    """SSD prefill (Mamba-2) at chunks of 64, 128 and 256, and Mamba-1's scan."""
    A, bias, D = -torch.rand(H, device=GPU) - 0.02, torch.rand(H, device=GPU) - 4, torch.randn(H, device=GPU)
    for lengths in ([2048], [8192], [1024] * 8, [256] * 32):
        T, S = sum(lengths), len(lengths)
        slots = torch.arange(1, S + 1, device=GPU, dtype=torch.int32)
        x, dt, B, C = randn(T, H, P), randn(T, H), randn(T, G, N), randn(T, G, N)
        pool = randn(S + 1, H, P, N, dtype=torch.float32)
        none = torch.zeros(S, dtype=torch.bool, device=GPU)
        cu, chunks = cut(lengths, 64)
        exact = triton_ssd.mamba_chunk_scan_varlen(
            x.float(), dt.float(), A, B.float(), C.float(), D, bias, pool, cu, slots, none, chunks
        )
        for size in (64, 128, 256):
            cu, chunks = cut(lengths, size)

            def call(x=x, dt=dt, B=B, C=C, pool=pool, cu=cu, slots=slots, none=none, chunks=chunks) -> Tensor:  # type: ignore[no-untyped-def]
                return triton_ssd.mamba_chunk_scan_varlen(
                    x, dt, A, B, C, D, bias, pool, cu, slots, none, chunks
                )

            wrong = error(call(), exact)
            yield {
                "work": "mamba_chunk_scan_varlen", "shape": f"{S}x{lengths[0]} Q={size} H={H} P={P} N={N} G={G}",
                "dtype": "bf16, state float32", "us": median_us(call, 15),
                "bytes": T * 2 * (2 * H * P + H + 2 * G * N) + S * H * P * N * 4,
                "ops": T * H * (4 * P * N + 64 * (N * G // H + P)), "error": wrong,
            }  # fmt: skip
    dim, size, T = 8192, 16, 2048
    A1, bias1 = -torch.rand(dim, size, device=GPU) - 0.02, torch.rand(dim, device=GPU) - 4
    for S in (1, 8):
        x, z, dt, B, C = (
            randn(T * S, dim),
            randn(T * S, dim),
            randn(T * S, dim),
            randn(T * S, size),
            randn(T * S, size),
        )
        pool = randn(S + 1, dim, size, dtype=torch.float32)
        slots = torch.arange(1, S + 1, device=GPU, dtype=torch.int32)
        cu, chunks = cut([T] * S, 256)
        none = torch.zeros(S, dtype=torch.bool, device=GPU)
        few = slice(0, 64)
        head, head_chunks = cut([64], 64)
        exact = reference.selective_scan_varlen(
            x[few].double(), dt[few].double(), A1.double(), B[few].double(), C[few].double(), None,
            z[few].double(), bias1.double(), pool.double(), head, slots[:1], none, head_chunks,
        )  # fmt: skip

        def call1(
            x=x, dt=dt, B=B, C=C, z=z, pool=pool, cu=cu, slots=slots, none=none, chunks=chunks
        ) -> Tensor:  # type: ignore[no-untyped-def]
            return triton_scan.selective_scan_varlen(
                x, dt, A1, B, C, None, z, bias1, pool, cu, slots, none, chunks
            )

        wrong = error(call1()[few], exact)
        yield {
            "work": "selective_scan_varlen", "shape": f"{S}x{T} dim={dim} N={size}", "dtype": "bf16, state float32",
            "us": median_us(call1, 10), "bytes": T * S * 2 * (4 * dim + 2 * size) + S * dim * size * 4,
            "ops": T * S * dim * size * 6, "error": wrong,
        }  # fmt: skip


def other_rows() -> Iterator[dict[str, Any]]:
    """Convolution, prefill and update, and the gated norm."""
    weight, bias = randn(CHANNELS, W), randn(CHANNELS)
    T = 8192
    x, window = randn(T, CHANNELS), randn(2, CHANNELS, W - 1)
    cu, chunks = cut([T], 256)
    one, none = torch.ones(1, dtype=torch.int32, device=GPU), torch.zeros(1, dtype=torch.bool, device=GPU)
    exact = conv_reference.causal_conv1d_varlen(
        x.float(), weight.float(), bias.float(), window.float(), cu, one, none, chunks, silu=True
    )

    def prefill() -> Tensor:
        return conv.causal_conv1d_varlen(x, weight, bias, window, cu, one, none, chunks, silu=True)

    wrong = error(prefill(), exact)
    yield {
        "work": "causal_conv1d_varlen", "shape": f"{T} x {CHANNELS} W={W}", "dtype": "bf16", "us": median_us(prefill),
        "bytes": 2 * T * CHANNELS * 2, "ops": 2 * W * T * CHANNELS, "error": wrong,
    }  # fmt: skip
    for S in (1, 32, 512):
        slots = torch.randperm(S, device=GPU).int() + 1
        pool, rows = randn(S + 1, CHANNELS, W - 1), randn(S, CHANNELS)
        exact = conv_reference.causal_conv1d_update(
            rows.double(), weight.double(), bias.double(), pool.double(), slots, silu=True
        )

        def update(pool=pool, rows=rows, slots=slots) -> Tensor:  # type: ignore[no-untyped-def]
            return conv.causal_conv1d_update(rows, weight, bias, pool, slots, silu=True)

        wrong = error(update(), exact)
        yield {
            "work": "causal_conv1d_update", "shape": f"S={S} x {CHANNELS} W={W}", "dtype": "bf16", "us": median_us(update),
            "bytes": 2 * S * CHANNELS * (2 * (W - 1) + 2), "ops": 2 * W * S * CHANNELS, "error": wrong,
        }  # fmt: skip
    width = 8192
    for T in (1, 512, 8192):
        x, z, scale = randn(T, width), randn(T, width), randn(width)
        exact = norm_reference.rms_norm_gated(x.double(), z.double(), scale.double(), 1e-5, width // G)

        def gated(x=x, z=z, scale=scale) -> Tensor:  # type: ignore[no-untyped-def]
            return norm.rms_norm_gated(x, z, scale, 1e-5, width // G)

        wrong = error(gated(), exact)
        yield {
            "work": "rms_norm_gated", "shape": f"{T} x {width} group {width // G}", "dtype": "bf16", "us": median_us(gated),
            "bytes": 3 * T * width * 2, "ops": 10 * T * width, "error": wrong,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument(
        "--only", default="", help="kinds of rows: update, format, replay, scan, other; all if empty"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_rate()
    left, right = randn(8192, 8192), randn(8192, 8192)
    product = 2 * 8192**3 / eager_us(lambda: left @ right) / 1e6
    print(f"copy {copy:.2f} TB/s, bf16 product {product:.0f} TFLOP/s")
    rows = []
    makers = {
        "update": update_rows,
        "format": format_rows,
        "replay": replay_rows,
        "scan": scan_rows,
        "other": other_rows,
    }
    wanted = options.only.split(",") if options.only else list(makers)
    for row in (r for name in wanted for r in makers[name]()):
        bound = max(row["bytes"] / copy, row["ops"] / product if "chunk" in row["work"] else 0) / 1e6
        row |= {"impl": "recurra triton", "fraction_of_ceiling": bound / row["us"]}
        limit = 1e-2
        assert row["error"] < limit, f"wrong, not timed: {row}"
        rows.append(row)
        print(f"{row['work']:34s} {row['shape']:38s} {row['dtype']:20s} {row['us']:9.1f} us"
              f" {row['fraction_of_ceiling']:5.2f} error {row['error']:.1e}")  # fmt: skip
        torch.cuda.empty_cache()
    options.out.write_text(
        json.dumps(
            {
                "commit": options.commit,
                "date": time.strftime("%Y-%m-%d"),
                "machine": torch.cuda.get_device_name(),
                "versions": {
                    "torch": torch.__version__,
                    "triton": triton.__version__,
                    "cuda": torch.version.cuda,
                },
                "ceilings": {"copy_tb_s": copy, "bf16_product_tflop_s": product},
                "rows": rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
