"""What a checkpoint's generation_config.json does to requests that leave fields out."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fakes import fake_engine

from recurra.config.engine import EngineConfig
from recurra.engine.generation import merged, read_sampling_defaults, shown
from recurra.engine.llm import LLM
from recurra.errors import CheckpointError, ConfigError
from recurra.sampling_params import SamplingParams


def read(folder: Path, content: Any, asked: str = "auto") -> dict[str, Any]:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "generation_config.json").write_text(text)
    return read_sampling_defaults(EngineConfig(model=folder, generation_config=asked))


def test_every_field_that_has_a_counterpart_is_taken(tmp_path: Path) -> None:
    content = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1,
        "max_new_tokens": 99, "min_new_tokens": 3, "do_sample": True, "eos_token_id": [1, 2],
        "transformers_version": "5", "max_length": 20,
    }  # fmt: skip
    assert read(tmp_path, content) == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1,
        "max_tokens": 99, "min_tokens": 3,
    }  # fmt: skip


@pytest.mark.parametrize("content", [{}, {"temperature": None, "do_sample": None}, {"do_sample": True}])
def test_nothing_said_is_nothing_taken(tmp_path: Path, content: dict[str, Any]) -> None:
    assert read(tmp_path, content) == {}


def test_no_file_none_and_another_folder(tmp_path: Path) -> None:
    assert read_sampling_defaults(EngineConfig(model=tmp_path)) == {}
    assert read(tmp_path, {"temperature": 0.5}, "none") == {}
    elsewhere = EngineConfig(model="elsewhere", generation_config=str(tmp_path))
    assert read_sampling_defaults(elsewhere) == {"temperature": 0.5}
    with pytest.raises(ConfigError, match='Use "auto"') as caught:
        read_sampling_defaults(EngineConfig(model=tmp_path, generation_config="vllm"))
    assert (caught.value.setting, caught.value.value) == ("generation_config", "vllm")


def test_do_sample_false_means_greedy_whatever_temperature_stands_beside(tmp_path: Path) -> None:
    defaults = read(tmp_path, {"do_sample": False, "temperature": 0.7, "top_p": 0.9})
    assert SamplingParams(**defaults).greedy
    assert not SamplingParams(**merged(defaults, {"temperature": 0.4})).greedy


@pytest.mark.parametrize(
    ("field", "value", "need"),
    [
        ("temperature", "hot", "must be a number"),
        ("temperature", -1, "from 0 to 100"),
        ("temperature", True, "must be a number"),
        ("top_p", 1.5, "at most 1"),
        ("top_k", 2.5, "an integer"),
        ("min_p", [0.1], "a number"),
        ("repetition_penalty", 0, "above 0"),
        ("max_new_tokens", 0, "at least 1"),
        ("min_new_tokens", -2, "from 0"),
        ("do_sample", "no", "true or false"),
    ],
)
def test_a_bad_value_names_file_field_and_value(tmp_path: Path, field: str, value: Any, need: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, {field: value})
    said = str(caught.value)
    assert str(tmp_path / "generation_config.json") in said
    assert f"{field} must be" in said
    assert need in said
    assert f"got {value!r}" in said
    assert "--generation-config" in said


@pytest.mark.parametrize("content", ["{", "[1]", '{"min_new_tokens": 5, "max_new_tokens": 4}'])
def test_a_bad_file_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read(tmp_path, content)
    if content != '{"min_new_tokens": 5, "max_new_tokens": 4}':
        assert read(tmp_path, content, "none") == {}


def test_what_can_not_be_honoured_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "recurra"):
        read(tmp_path, {"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": []})
        assert caplog.messages == []
        read(tmp_path, {"num_beams": 4, "stop_strings": ["x"], "temperature": 0.5})
    (message,) = caplog.messages
    assert "num_beams 4" in message
    assert "stop_strings ['x']" in message
    assert "temperature" not in message


def test_the_caller_wins_field_by_field() -> None:
    defaults = {"temperature": 0.7, "top_p": 0.9, "min_tokens": 5, "max_tokens": 50}
    params = SamplingParams(**merged(defaults, {"temperature": 0.0, "max_tokens": 3}))
    assert (params.temperature, params.top_p, params.max_tokens, params.min_tokens) == (0.0, 0.9, 3, 3)
    assert merged(defaults, {"min_tokens": 2})["min_tokens"] == 2
    assert shown(defaults) == "temperature 0.7, top_p 0.9, min_tokens 5, max_tokens 50"


def test_llm_answers_with_them_where_no_parameters_come_and_params_stay_as_they_are() -> None:
    engine = fake_engine()
    engine.sampling_defaults = {"temperature": 0.0, "max_tokens": 5}
    llm = LLM.of_engine(engine)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=5)
    first, second = llm.generate([[1, 2], [1, 2]], use_tqdm=False)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert len(first.outputs[0].token_ids) == 5
    (plain,) = llm.generate([1, 2], SamplingParams(), use_tqdm=False)
    assert len(plain.outputs[0].token_ids) == 16
    assert SamplingParams().temperature == 1.0
