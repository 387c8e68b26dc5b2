"""Backends are chosen once, by a stated order, and every refusal has its reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recurra.device import Device
from recurra.errors import ConfigError
from recurra.ops import Ops, build
from recurra.ops.registry import BACKENDS, OPERATORS, choose, refusal

CPU = Device("cpu", 0, "a cpu", (0, 0), 2, has_triton=False, triton_interpreter=False, has_numba=False)
GPU = replace(CPU, type="cuda", name="a gpu", capability=(9, 0), has_triton=True, has_numba=True)


def _served(ops: Ops) -> dict[str, str]:
    return {choice.operator: choice.backend for choice in ops.choices}


def test_plain_cpu_is_served_by_the_reference() -> None:
    served = _served(build(CPU))
    assert served.pop("build_decode_stack") == "none"
    assert set(served.values()) == {"reference"}
    assert set(served) == {o.name for o in OPERATORS if not o.optional}


def test_gpu_order_and_reasons() -> None:
    """Without importing a kernel: the choice of a missing operator says what each backend lacks."""
    refused = {name: refusal(name, GPU) for name in BACKENDS}
    assert refused["triton"] is None
    assert refused["torch"] is None
    assert refused["reference"] is None
    assert "GPU" in str(refused["cpu"])


@pytest.mark.parametrize(
    ("backend", "device", "word"),
    [
        ("triton", replace(CPU, has_triton=True), "TRITON_INTERPRET"),
        ("triton", replace(GPU, has_triton=False), "not installed"),
        ("cpu", CPU, "numba"),
        ("torch", CPU, "cpu backend"),
    ],
)
def test_refusals_say_why(backend: str, device: Device, word: str) -> None:
    assert word in str(refusal(backend, device))


@pytest.mark.parametrize("setting", ["backend", "prefill_backend"])
def test_an_unusable_backend_is_an_error_that_names_what_works(setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"{setting}='cpu'.*Usable here: reference"):
        build(CPU, **{setting: "cpu"})
    with pytest.raises(ConfigError, match=rf"{setting}='tritom'.*Valid: triton"):
        build(CPU, **{setting: "tritom"})


def test_every_backend_before_the_chosen_one_is_explained() -> None:
    for operator in OPERATORS:
        choice, function = choose(operator, CPU, BACKENDS)
        before = BACKENDS if choice.backend == "none" else BACKENDS[: BACKENDS.index(choice.backend)]
        assert tuple(choice.refused) == tuple(before)
        assert all(choice.refused.values())
        assert (function is None) == (choice.backend == "none")


def test_prefill_backend_moves_the_scans_alone() -> None:
    numba = replace(CPU, has_numba=True)
    mixed, whole = _served(build(numba, prefill_backend="reference")), _served(build(numba))
    for operator in OPERATORS:
        expected = "reference" if operator.prefill else whole[operator.name]
        assert mixed[operator.name] == expected
