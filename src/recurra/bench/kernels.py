"""Times operators on this machine, each one only after it was held to its float64 definition."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recurra.bench.kernel_cases import LARGE, SMALL, Case, Sizes, make_cases
from recurra.bench.kernel_peers import PEERS
from recurra.device import Device
from recurra.ops.registry import BACKENDS, OPERATORS, implementation, refusal

#: Largest relative error of an output or a state (2-norm) in float32 and in 16 bits.
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}


@dataclass(frozen=True, slots=True)
class Row:
    """One implementation of one operator at one shape.

    Attributes:
        error: relative to the float64 definition, the worst of all that the call writes.
        us: median of a call in microseconds; None if it is not right, or can't run.
        ratio: the reference's time over this one's.
        fraction_of_ceiling: least time by the measured rates, over this time.
        refused: why there is no time.
    """

    operator: str
    shape: str
    impl: str
    error: float | None
    us: float | None
    ratio: float | None
    nbytes: int
    operations: int
    fraction_of_ceiling: float | None
    refused: str


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Rates measured in the same run: a copy (read plus written) and a matrix product."""

    copy_gb_s: float
    product_gflop_s: float

    def least_us(self, case: Case) -> float:
        product = case.operations / self.product_gflop_s if case.products else 0.0
        return max(case.nbytes / self.copy_gb_s, product) / 1e3


def measure(device: Device, sizes: Sizes | None = None) -> tuple[Ceilings, list[Row]]:
    """Check and time every implementation that runs on ``device``, peers that are installed among them."""
    where = torch.device(device.type)
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    ceilings = _ceilings(where, dtype)
    rows: list[Row] = []
    for case in make_cases(sizes or (LARGE if on_gpu else SMALL), where, dtype, 64):
        rows += _rows(case, device, dtype, ceilings)
    return ceilings, rows


def _rows(case: Case, device: Device, dtype: torch.dtype, ceilings: Ceilings) -> Iterator[Row]:
    operator = next(o for o in OPERATORS if o.name == case.operator)
    reference = implementation(operator, "reference")
    assert reference is not None, operator
    wide = case.copied(lambda t: t.double() if t.is_floating_point() else t.clone())
    exact = _written(wide, reference)
    base = _median_us(case.copied(Tensor.clone), reference, replay=False)
    for name, function in _implementations(case.operator, device):
        error, us, refused = None, None, ""
        try:
            error = _error(_written(case.copied(Tensor.clone), function), exact)
        except Exception as reason:  # a peer may refuse anything, in any way
            if name in BACKENDS:
                raise
            refused = f"{type(reason).__name__}: {reason}"
        if error is not None and not error <= _LIMITS[dtype]:
            refused = f"wrong by {error:.1e}"
        if not refused:
            mine = case.copied(Tensor.clone)
            us = base if name == "reference" else _median_us(mine, function, replay=device.type == "cuda")
        yield Row(
            case.operator, case.shape, name, error, us, base / us if us else None, case.nbytes,
            case.operations, ceilings.least_us(case) / us if us else None, refused,
        )  # fmt: skip


def _implementations(operator: str, device: Device) -> Iterator[tuple[str, Callable[..., Any]]]:
    entry = next(o for o in OPERATORS if o.name == operator)
    for backend in BACKENDS:
        function = implementation(entry, backend) if refusal(backend, device) is None else None
        if function is not None:
            yield backend, function
    for peer in PEERS:
        function = peer.load(operator) if device.type == "cuda" else None
        if function is not None:
            yield peer.name, function


def _written(case: Case, function: Callable[..., Any]) -> list[Tensor]:
    """What a call returns, and the floating-point arguments as it leaves them."""
    out = function(*case.arguments, **case.options)
    return [out, *(a for a in case.arguments if isinstance(a, Tensor) and a.is_floating_point())]


def _error(got: list[Tensor], exact: list[Tensor]) -> float:
    pairs = zip(got, exact, strict=True)
    return max(float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def _median_us(case: Case, function: Callable[..., Any], *, replay: bool) -> float:
    def call() -> None:
        function(*case.arguments, **case.options)

    if not replay:
        return _median_of(call, case.arguments[0].device.type == "cuda")
    cuda: Any = torch.cuda  # its functions have no types
    call()
    cuda.synchronize()
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        for _ in range(5):
            call()
    return _median_of(graph.replay, True) / 5


def _median_of(call: Callable[[], object], on_gpu: bool) -> float:
    """Median of up to 20 calls, or of those that half a second has time for."""
    cuda: Any = torch.cuda  # its functions have no types
    wait: Callable[[], None] = cuda.synchronize if on_gpu else lambda: None
    call()
    times: list[float] = []
    stop = time.perf_counter() + 0.5
    while len(times) < 3 or (len(times) < 20 and time.perf_counter() < stop):
        wait()
        begin = time.perf_counter()
        call()
        wait()
        times.append((time.perf_counter() - begin) * 1e6)
    return statistics.median(times)


def _ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    on_gpu = device.type == "cuda"
    count, width = (2**30, 8192) if on_gpu else (2**25, 1024)
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    copy = _median_of(lambda: target.copy_(source), on_gpu)
    left = torch.ones(width, width, device=device, dtype=dtype)
    product = _median_of(lambda: torch.mm(left, left), on_gpu)
    return Ceilings(2 * source.nbytes / copy / 1e3, 2 * width**3 / product / 1e3)


def table(ceilings: Ceilings, rows: list[Row]) -> str:
    """The figures for a terminal."""
    lines = [
        f"copy {ceilings.copy_gb_s:.1f} GB/s, matrix product {ceilings.product_gflop_s:.0f} GFLOP/s",
        f"{'operator':26}{'shape':34}{'impl':16}{'us':>11}{'x ref':>8}{'MB':>8}{'MFLOP':>9}{'of ceiling':>11}{'error':>9}",
    ]
    for r in rows:
        work = f"{r.operator:26}{r.shape:34}{r.impl:16}"
        if r.us is None or r.ratio is None or r.fraction_of_ceiling is None or r.error is None:
            lines.append(f"{work} not timed: {r.refused}")
            continue
        lines.append(
            f"{work}{r.us:>11.1f}{r.ratio:>8.1f}{r.nbytes / 1e6:>8.1f}{r.operations / 1e6:>9.1f}"
            f"{r.fraction_of_ceiling:>11.2f}{r.error:>9.1e}"
        )
    return "\n".join(lines)


def as_record(ceilings: Ceilings, rows: list[Row]) -> dict[str, Any]:
    """The figures for a file."""
    return {"ceilings": asdict(ceilings), "rows": [asdict(row) for row in rows]}


def plot(path: Path, ceilings: Ceilings, rows: list[Row]) -> None:
    """A roofline: rates over operations a byte, under the measured ceilings.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    ridge = ceilings.product_gflop_s / ceilings.copy_gb_s
    reach = [2.0**n for n in range(-4, 12)] + [ridge]
    roof = [(x, min(x * ceilings.copy_gb_s, ceilings.product_gflop_s)) for x in sorted(reach)]
    axes.loglog([x for x, _ in roof], [y for _, y in roof], color="black", label="measured ceilings")
    for impl in dict.fromkeys(row.impl for row in rows):
        timed = [r for r in rows if r.impl == impl and r.us is not None]
        axes.scatter(
            [r.operations / r.nbytes for r in timed],
            [r.operations / (r.us or 1.0) / 1e3 for r in timed], label=impl,
        )  # fmt: skip
    axes.set(xlabel="operations a byte", ylabel="GFLOP/s")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
