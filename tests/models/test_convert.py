"""A pickled checkpoint made safe: the same layout, the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_cases import machine_of

import checkpoints
from recurra.models.convert import main


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """An original-layout folder as that package's authors publish it."""
    healthy = checkpoints.write_mamba(tmp_path / "healthy", tokenizer=True)
    folder = checkpoints.write_mamba_ssm(healthy, tmp_path / "pickled")
    tensors = checkpoints.read_tensors(folder)
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"]  # tied: one memory, two names
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def test_converted_checkpoint_gives_the_same_answers(
    pickled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new"
    assert main([str(pickled), str(target)]) == 0
    assert "wrote" in capsys.readouterr().out
    assert sorted(f.name for f in target.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    machine = machine_of("cpu", "reference")
    prompt = torch.randint(checkpoints.VOCABULARY, (17,)).tolist()
    want = machine.driver(tmp_path / "healthy").whole(prompt)
    assert torch.equal(machine.driver(target).whole(prompt), want)


def test_refusals(pickled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(pickled), str(tmp_path / "healthy")]) == 1
    assert "holds safetensors files already" in capsys.readouterr().err
    assert main([str(tmp_path / "healthy"), str(tmp_path / "new")]) == 1
    assert "has none" in capsys.readouterr().err
