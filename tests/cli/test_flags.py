"""Settings classes become flags by themselves."""

from __future__ import annotations

import inspect
from typing import Any, Literal

import pytest
from cyclopts import App
from pydantic import BaseModel

from recurra.cli import flags as module
from recurra.cli.flags import (
    FlagGroup,
    engine_flags,
    field_help,
    model_flags,
    sampling_flags,
    server_flags,
    takes,
)
from recurra.config.engine import EngineConfig
from recurra.config.mamba import MambaBackendEnum, MambaConfig
from recurra.config.server import ServerConfig
from recurra.errors import RequestError
from recurra.sampling_params import SamplingParams


class Settings(BaseModel):
    """Made for the test.

    Attributes:
        size: how
            large.
        kind, name: a choice.
    """

    size: int = 3
    kind: Literal["a", "b"] = "a"
    name: str | None = None
    many: tuple[str, ...] = ()
    table: dict[str, Any] | None = None
    on: bool = True
    off: bool = False


def parse(group: FlagGroup, *arguments: str) -> Any:
    """Run a command that returns what the group built."""
    app = App(name="t")

    @app.command
    @takes(group=group)
    def go(*, group: Any) -> Any:
        return group

    return app(["go", *arguments], exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> FlagGroup:
    return FlagGroup("Settings", tuple(model_flags(Settings)), lambda values: Settings(**values))


def test_absent_flags_leave_defaults(group: FlagGroup) -> None:
    assert parse(group) == Settings()


def test_every_kind_of_field_is_parsed(group: FlagGroup) -> None:
    given = parse(
        group, "--size", "-7", "--kind", "b", "--name", "x", "--many", "p", "--many", "q",
        "--table", '{"k": [1]}', "--no-on", "--off",
    )  # fmt: skip
    assert given == Settings(
        size=-7, kind="b", name="x", many=("p", "q"), table={"k": [1]}, on=False, off=True
    )


def test_help_comes_from_the_docstring() -> None:
    assert field_help(EngineConfig)["model"] == "Checkpoint folder"
    assert field_help(EngineConfig)["max_num_seqs"] == "Most sequences computed in one step"


def test_every_engine_setting_has_a_flag_with_help() -> None:
    flags = {flag.setting: flag for flag in engine_flags().flags}
    own = set(EngineConfig.model_fields) - {"model", "mamba_config"}
    assert set(flags) == own | set(MambaConfig.model_fields)
    assert all(flag.help for flag in flags.values())


@pytest.mark.parametrize(
    "name",
    [
        "--mamba-backend", "--mamba-ssu-algorithm", "--enable-mamba-cache-stochastic-rounding",
        "--mamba-cache-philox-rounds", "--mamba-ssm-cache-dtype", "--max-num-seqs", "--max-num-batched-tokens",
        "--max-model-len", "--dtype", "--load-format", "--seed", "--chat-template", "--num-threads",
    ],
)  # fmt: skip
def test_engine_flags_have_the_names_that_the_field_knows(name: str) -> None:
    assert name in [flag.name for flag in engine_flags().flags]


def test_mamba_flags_become_a_mamba_config() -> None:
    assert "mamba_config" not in parse(engine_flags())
    settings = parse(engine_flags(), "--mamba-backend", "reference", "--max-num-seqs", "4")
    assert settings["mamba_config"] == MambaConfig(backend=MambaBackendEnum.REFERENCE)
    assert EngineConfig(model="m", **settings).max_num_seqs == 4
    rounding = parse(
        engine_flags(), "--enable-mamba-cache-stochastic-rounding", "--mamba-cache-philox-rounds", "4"
    )
    assert rounding["mamba_config"].stochastic_rounding_philox_rounds == 4


def test_engine_defaults_are_the_class_defaults() -> None:
    assert EngineConfig(model="m", **parse(engine_flags())) == EngineConfig(model="m")


def test_server_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(server_flags()) == ServerConfig()
    given = parse(
        server_flags(), "--api-key", "k1", "--api-key", "k2", "--port", "0", "--served-model-name", "m",
        "--default-chat-max-tokens", "none",
    )  # fmt: skip
    assert [key.get_secret_value() for key in given.api_keys] == ["k1", "k2"]
    assert (given.port, given.served_model_name, given.default_chat_max_tokens) == (0, ("m",), None)
    monkeypatch.setenv("RECURRA_API_KEY", "from-outside")
    assert parse(server_flags()).api_keys[0].get_secret_value() == "from-outside"


def test_sampling_flags_take_other_defaults() -> None:
    group = sampling_flags(("n",), max_tokens=99)
    assert parse(group).params({}) == SamplingParams(max_tokens=99)
    given = parse(
        group, "--max-tokens", "5", "--stop", "a", "--stop-token-ids", "3", "--logit-bias", '{"7": -3}'
    )
    expected = SamplingParams(max_tokens=5, stop=["a"], stop_token_ids=[3], logit_bias={7: -3})
    assert given.params({}) == expected


def test_the_models_sampling_defaults_stand_between_flags_and_the_commands_own() -> None:
    group = sampling_flags(("n",), max_tokens=99, temperature=0.8)
    model = {"temperature": 0.3, "top_p": 0.9}
    settled = parse(group, "--top-p", "1").params(model)
    assert (settled.temperature, settled.top_p, settled.max_tokens) == (0.3, 1.0, 99)
    assert parse(group, "--temperature", "0").params(model).greedy
    assert parse(group, "--max-tokens", "2").params({"min_tokens": 5}).min_tokens == 2
    with pytest.raises(RequestError, match="temperature"):
        parse(group, "--temperature", "-1")


def test_a_command_keeps_its_own_parameters() -> None:
    @takes(group=sampling_flags())
    def go(model: str, *, quiet: module.Quiet = False, group: Any) -> None: ...

    names = list(inspect.signature(go).parameters)
    assert names[:2] == ["model", "quiet"]
    assert "group" not in names
