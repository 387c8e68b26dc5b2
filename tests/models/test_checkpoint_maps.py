"""Maps from checkpoints to parameters: tensors that share one, experts in either form, spellings, and what nobody needs."""

from __future__ import annotations

import shutil
from pathlib import Path

import cases_granite_moe_hybrid
import cases_jamba
import cases_nemotron_h
import pytest
import torch
from model_cases import machine_of
from safetensors.torch import save_file
from torch import Tensor, nn

import checkpoints
from recurra.models.weights import Either, Entry, Rows, draw


def load(folder: Path) -> dict[str, Tensor]:
    model = machine_of("cpu", "reference").driver(folder).model
    assert isinstance(model, nn.Module)
    return model.state_dict()


def rewritten(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    target.mkdir()
    shutil.copy(source / "config.json", target)
    save_file({name: t.contiguous() for name, t in tensors.items()}, target / "model.safetensors")
    return target


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert torch.equal(value, want[name]), name


def test_projections_share_a_parameter_in_order(tmp_path: Path) -> None:
    folder = cases_jamba.write(tmp_path / "model")
    stored, got = checkpoints.read_tensors(folder), load(folder)
    names = [f"model.layers.2.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(got["layers.2.mixer.qkv.weight"], torch.cat([stored[name] for name in names]))


def test_experts_one_by_one_or_stacked(tmp_path: Path) -> None:
    folder = cases_jamba.write(tmp_path / "model")
    tensors = checkpoints.read_tensors(folder)
    for layer in (1, 3):
        prefix = f"model.layers.{layer}.feed_forward.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{prefix}.{e}.{name}_proj.weight") for e in range(5)])
            for name in ("gate", "up", "down")
        }
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{prefix}.down_proj"] = parts["down"]
    assert_same(load(rewritten(folder, tmp_path / "stacked", tensors)), load(folder))


def test_other_spellings(tmp_path: Path) -> None:
    folder = cases_granite_moe_hybrid.write(tmp_path / "model")
    spell = {"input_linear.weight": "experts.gate_up_proj", "output_linear.weight": "experts.down_proj"}
    tensors = {}
    for name, value in checkpoints.read_tensors(folder).items():
        head, moe, tail = name.partition("block_sparse_moe.")
        tensors[head + moe + spell.get(tail, tail.replace("router.layer.", "router."))] = value
    assert any("experts.gate_up_proj" in name for name in tensors)
    assert_same(load(rewritten(folder, tmp_path / "spelt", tensors)), load(folder))


def test_tensors_that_nobody_needs(tmp_path: Path) -> None:
    folder = cases_nemotron_h.write(tmp_path / "model")
    tensors = checkpoints.read_tensors(folder) | {"mtp.layers.0.norm.weight": torch.ones(3)}
    assert_same(load(rewritten(folder, tmp_path / "more", tensors)), load(folder))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Parameter(torch.zeros(5, 2), requires_grad=False)


PARTS = (Entry("a", "both", part=Rows(0, 2)), Entry("b", "both", part=Rows(2, 3)))


def test_parts_make_up_the_whole() -> None:
    model = Model()
    draw(model, (Either((PARTS, (Entry("ab", "both"),))),), 1, 0, None)
    assert model.both.data.abs().min() > 0


@pytest.mark.parametrize("entries", [PARTS[:1], (*PARTS, Entry("c", "both", part=Rows(0, 1)))])
def test_a_map_that_fills_too_little_or_too_much_is_a_bug(entries: tuple[Entry, ...]) -> None:
    with pytest.raises(AssertionError, match="too little or too much"):
        draw(Model(), entries, 1, 0, None)
