"""Whole models on the Triton kernels, without a GPU: run with ``TRITON_INTERPRET=1`` (about ten seconds each)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_cases import assert_close, machine_of, oracle_log_probs
from model_driver import Piece

import checkpoints
from oracle import load_oracle
from recurra.device import detect

WRITERS = {
    "mamba": checkpoints.write_mamba,
    "falcon": checkpoints.write_falcon_mamba,
    "mamba2": lambda folder: checkpoints.write_mamba2(folder, n_groups=2, time_step_limit=(0.05, 0.1)),
}


@pytest.mark.skipif(not detect("cpu").triton_interpreter, reason="TRITON_INTERPRET=1 is not set")
@pytest.mark.parametrize("name", WRITERS)
def test_interpreted_kernels(name: str, tmp_path: Path) -> None:
    """Whole, cut, token by token, and packed with others in a step that also decodes."""
    folder = WRITERS[name](tmp_path)
    oracle = load_oracle(folder)
    prompt = torch.randint(checkpoints.VOCABULARY, (29,)).tolist()
    want = oracle_log_probs(oracle, prompt)
    driver = machine_of("cpu", "triton").driver(folder)
    assert_close(driver.whole(prompt, 1), want)
    assert_close(driver.pieces(prompt[:20], [3, 17], 2), want[:20])
    assert_close(driver.token_by_token(prompt[:9], 3), want[:9])
    mixed = driver.step(
        decode=[Piece(3, prompt[9:10], 9), Piece(0, [0])],
        prefill=[Piece(7, prompt[:4]), Piece(2, prompt[20:], 20), Piece(5, prompt[:1])],
    )
    for got, rows in zip(mixed, (want[9:10], None, want[:4], want[20:], want[:1]), strict=True):
        if rows is not None:
            assert_close(got, rows)
