"""Quantised checkpoints are the plain ones that they stand for; what is wrong with one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases_bamba
import cases_jamba
import cases_qwen3_next
import pytest
import torch
from hybrid_cases import Case
from model_cases import machine_of
from model_driver import Driver, Piece
from quantised import WAYS, quantise
from safetensors.torch import load_file, save_file
from torch import Tensor

import checkpoints
from recurra.errors import CheckpointError
from recurra.models import load_model, read_config
from recurra.models.quant import Scheme, dequantise, spread, unpack

PROMPT = [3, 141, 59, 26, 5, 35, 89, 79, 3, 238, 46]


@pytest.fixture(scope="module")
def bamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cases_bamba.CASES["bamba"].write(tmp_path_factory.mktemp("bamba"))


def _load(folder: Path, backend: str = "reference", weight: torch.dtype = torch.float32) -> Any:
    return load_model(
        read_config(folder), ops=machine_of("cpu", backend).ops, device=torch.device("cpu"), weight_dtype=weight,
        act_dtype=torch.float32,
    )  # fmt: skip


def _scores(model: Any) -> Tensor:
    return Driver(model).step(prefill=[Piece(1, PROMPT)])[0]


@pytest.mark.parametrize("way", list(WAYS))
def test_scores_are_those_of_the_plain_weights(way: str, bamba: Path, tmp_path: Path) -> None:
    stored, plain = quantise(bamba, tmp_path, way)
    got, want = _scores(_load(stored)), _scores(_load(plain))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert (want - _scores(_load(bamba))).abs().max() > 1e-3, "quantising changed nothing"


def _narrow(model: torch.nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.dtype in (torch.int8, torch.float8_e4m3fn)]


@pytest.mark.parametrize("way", ["int8", "int8 packed"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_int8_stays_int8_on_the_cpu(way: str, backend: str, bamba: Path, tmp_path: Path) -> None:
    stored, plain = quantise(bamba, tmp_path, way)
    model = _load(stored, backend, torch.bfloat16)
    assert "layers.2.mixer.qkv.weight" in _narrow(model)
    assert "layers.0.mlp.w_in.weight" in _narrow(model)
    # The kept weights aren't rounded to bfloat16, the tables are in both.
    want = _load(plain, backend)
    for path in ("embedding.weight", "head.weight"):
        wide = want.get_parameter(path)
        wide.data.copy_(wide.bfloat16().float())
    torch.testing.assert_close(_scores(model), _scores(want), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["int8 zero points", "int4", "fp8", "float channel"])
def test_others_become_wide_on_the_cpu(way: str, bamba: Path, tmp_path: Path) -> None:
    assert _narrow(_load(quantise(bamba, tmp_path, way)[0])) == []


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["fp8", "fbgemm", "float channel", "fp8 blocks", "int8"])
def test_float8_on_the_gpu(way: str, tmp_path: Path) -> None:
    """Made for float8 activations it stays float8, and scores are near those of the plain weights."""
    source = cases_bamba.write(
        tmp_path / "source", hidden_size=64, intermediate_size=64, mamba_n_heads=8, mamba_d_state=16
    )
    stored, plain = quantise(source, tmp_path, way)
    models = [
        load_model(
            read_config(folder), ops=machine_of("cuda", "triton").ops, device=torch.device("cuda"),
            weight_dtype=torch.bfloat16, act_dtype=torch.bfloat16,
        )
        for folder in (stored, plain)
    ]  # fmt: skip
    assert bool(_narrow(models[0])) == (way in ("fp8", "fbgemm"))
    got, want = (Driver(m, device=torch.device("cuda")).step(prefill=[Piece(1, PROMPT)])[0] for m in models)
    assert got.isfinite().all()
    assert (got - want).norm() <= (0.06 if _narrow(models[0]) else 1e-6) * want.norm()


@pytest.mark.parametrize("cases", [cases_jamba.CASES, cases_qwen3_next.CASES], ids=["jamba", "qwen3_next"])
@pytest.mark.parametrize("way", ["fp8 blocks", "int8", "int4"])
def test_experts(way: str, cases: dict[str, Case], tmp_path: Path) -> None:
    """Each in tensors of its own, and projections whose rows are stored in another order."""
    source = next(iter(cases.values())).write(tmp_path / "source")
    stored, plain = quantise(source, tmp_path, way)
    torch.testing.assert_close(_scores(_load(stored)), _scores(_load(plain)), rtol=1e-4, atol=1e-4)


def test_scales_in_another_file(bamba: Path, tmp_path: Path) -> None:
    stored, plain = quantise(bamba, tmp_path, "int8")
    tensors = load_file(stored / "model.safetensors")
    scales = {n: t for n, t in tensors.items() if n.endswith("_scale")}
    rest = {n: t for n, t in tensors.items() if n not in scales}
    (stored / "model.safetensors").unlink()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    places = {}
    for file, part in zip(names, (rest, scales), strict=True):
        save_file(part, stored / file)
        places |= dict.fromkeys(part, file)
    (stored / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    torch.testing.assert_close(_scores(_load(stored)), _scores(_load(plain)), rtol=1e-4, atol=1e-4)


def test_what_is_done_is_logged(bamba: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, _ = quantise(bamba, tmp_path, "int4")
    _load(stored)
    assert "weights are int of 4 bits with a scale for 16 columns of a row, 0 stay so" in caplog.text


def _spoil(folder: Path, ending: str, value: Tensor | None) -> str:
    """Replace the first tensor whose name ends so, or take it away."""
    tensors = load_file(folder / "model.safetensors")
    name = next(n for n in sorted(tensors) if n.endswith(ending))
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    return name


@pytest.mark.parametrize(
    ("way", "ending", "value", "problem"),
    [
        ("fp8 blocks", "weight_scale_inv", None, "has no scales: {stem}weight_scale is missing"),
        ("fp8 blocks", "weight_scale_inv", torch.ones(2, 2), r"{name} has shape \[2, 2\] where \["),
        ("int8", "weight_scale", torch.ones(3, 1), r"{name} has shape \[3, 1\] where \["),
        ("int4", "weight_shape", None, "has no shape: {name} is missing"),
        ("int4", "weight_packed", None, "left over.*{stem}weight_scale"),
        ("int8 zero points", "weight_zero_point", torch.zeros(2, 2, dtype=torch.int8), r"{name} has shape \[2, 2\]"),
        ("int8", "in_proj.weight", torch.zeros(4, 4).to(torch.float8_e4m3fn), "{name} is stored as F8_E4M3"),
    ],
)  # fmt: skip
def test_faults_are_named(
    way: str, ending: str, value: Tensor | None, problem: str, bamba: Path, tmp_path: Path
) -> None:
    stored, _ = quantise(bamba, tmp_path, way)
    name = _spoil(stored, ending, value)
    stem = name[: len(name) - len(name.rsplit(".", 1)[1])]
    with pytest.raises(CheckpointError, match=problem.format(name=name, stem=stem)):
        _load(stored)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"quant_method": "awq"}, "quant_method='awq': unknown.*Known: fp8, fbgemm_fp8, compressed-tensors"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size=.*two whole numbers"),
        ({"format": "nvfp4-pack-quantized"}, "format='nvfp4-pack-quantized': unknown. Known: float-quantized"),
        ({"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.*sparse"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "transform_config.*rotated"),
        ({"config_groups": {"g": {"weights": {"num_bits": 3}}}}, "num_bits=3: no 'int' of so many bits"),
        ({"config_groups": {"g": {"weights": {"strategy": "tensor_group"}}}}, "strategy='tensor_group': unknown"),
    ],
)  # fmt: skip
def test_unknown_ways_are_refused(changes: dict[str, Any], problem: str, bamba: Path, tmp_path: Path) -> None:
    stored, _ = quantise(bamba, tmp_path, "int8")
    settings = json.loads((stored / "config.json").read_text())
    settings["quantization_config"] |= changes
    (stored / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match=problem):
        read_config(stored)


def test_a_plain_mamba_with_a_quantised_projection(tmp_path: Path) -> None:
    source = checkpoints.write_mamba2(tmp_path / "source", num_hidden_layers=2)
    stored, plain = quantise(source, tmp_path, "int8")
    for backend in ("reference", "cpu"):
        got, want = _scores(_load(stored, backend)), _scores(_load(plain, backend))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_unpacking_every_number(bits: int) -> None:
    numbers = torch.arange(-(2 ** (bits - 1)), 2 ** (bits - 1), dtype=torch.int8)
    each = 32 // bits
    words = [
        sum((int(n) + 2 ** (bits - 1)) << (bits * i) for i, n in enumerate(numbers[at : at + each]))
        for at in range(0, len(numbers), each)
    ]
    packed = torch.tensor([w - 2**32 if w >= 2**31 else w for w in words], dtype=torch.int32)
    assert torch.equal(unpack(packed[None], bits, len(numbers))[0], numbers)
    assert torch.equal(unpack(packed[None], bits, 5)[0], numbers[:5])


def test_scales_of_stacked_experts() -> None:
    stored = torch.randn(3, 5, 7).to(torch.float8_e4m3fn)
    block = Scheme("float", 8, "block", (2, 4))
    scale = torch.rand(3, 3, 2)
    assert block.scale_shapes((3, 5, 7)) == ((3, 3, 2),)
    got = dequantise(stored, spread(scale, (3, 5, 7), block), None)
    for e, r, c in ((0, 0, 0), (2, 4, 6), (1, 3, 4)):
        assert got[e, r, c] == stored[e, r, c].float() * scale[e, r // 2, c // 4]
    for shape in ((3,), (3, 1, 1)):
        each = Scheme("float", 8, "tensor")
        assert shape in each.scale_shapes((3, 5, 7))
        one = dequantise(stored, spread(torch.rand(shape), (3, 5, 7), each), None)
        assert one.shape == stored.shape
