"""Settings classes as flags, so that a new setting is a flag without another line.

A command names the groups that it takes; each becomes one keyword argument of the command:

>>> @takes(engine=engine_flags())
... def generate(model: str, *, engine: dict[str, Any]) -> None: ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args, get_origin

from cyclopts import Group, Parameter
from pydantic import BaseModel, SecretStr, ValidationError

from recurra.cli.failure import flag_name
from recurra.errors import ConfigError
from recurra.sampling_params import SamplingParams


def switch(*names: str) -> Parameter:
    """A flag that is off unless it is given."""
    return Parameter(name=names or None, negative="", show_default=False)


Model = Annotated[str, Parameter(help="Checkpoint folder")]
Quiet = Annotated[bool, switch("--quiet", "-q")]


@dataclass(frozen=True, slots=True)
class Flag:
    """One command-line flag.

    Attributes:
        setting: name in the settings object.
        name: the flag, with its dashes.
        type: what the command line parses.
        default: shown, and used where the flag is absent.
        help: one line.
        is_json: the text is JSON.
        env_var: environment variable read where the flag is absent.
    """

    setting: str
    name: str
    type: Any
    default: Any
    help: str
    is_json: bool = False
    env_var: str | None = None

    def parameter(self, group: Group) -> Parameter:
        """How the command line shows and reads the flag."""
        offered = not self.help.startswith("Not offered yet")
        return Parameter(
            name=self.name,
            group=group,
            help=self.help,
            env_var=self.env_var,
            show=offered,
            show_default=self.default not in (None, False),
            negative=None if self.default is True else "",
            negative_iterable="",
            allow_leading_hyphen=self.is_json or self.type in (int, float),
        )


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Flags under one heading, and what is made of their values.

    Attributes:
        title: the heading.
        flags: in the order of the help.
        build: makes an object of settings and values.
        given_only: ``build`` gets no defaults, only what was given.
    """

    title: str
    flags: tuple[Flag, ...]
    build: Callable[[dict[str, Any]], Any]
    given_only: bool = False

    def parameters(self, argument: str, order: int) -> list[inspect.Parameter]:
        """The flags as keyword parameters of a command."""
        group = Group(self.title, sort_key=order)
        return [
            inspect.Parameter(
                f"{argument}__{flag.setting}",
                inspect.Parameter.KEYWORD_ONLY,
                default=flag.default,
                annotation=Annotated[flag.type, flag.parameter(group)],
            )
            for flag in self.flags
        ]

    def value(self, argument: str, given: dict[str, Any]) -> Any:
        """Take this group's values out of ``given`` and build its object."""
        values = {}
        for flag in self.flags:
            key = f"{argument}__{flag.setting}"
            if key in given:
                value = given.pop(key)
                values[flag.setting] = _parse_json(flag, value) if flag.is_json else value
            elif flag.default is not None and not self.given_only:
                values[flag.setting] = flag.default
        return self.build(values)


def takes(**groups: FlagGroup) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replace the keyword arguments named in ``groups`` by their flags."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(command)
        own = [_evaluated(p, command) for name, p in signature.parameters.items() if name not in groups]
        added = [
            p for order, (name, group) in enumerate(groups.items()) for p in group.parameters(name, order)
        ]

        @functools.wraps(command)
        def run(*args: Any, **kwargs: Any) -> Any:
            built = {name: group.value(name, kwargs) for name, group in groups.items()}
            return command(*args, **kwargs, **built)

        run.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        del run.__wrapped__  # its signature would be read instead
        return run

    return decorate


def _evaluated(parameter: inspect.Parameter, command: Callable[..., Any]) -> inspect.Parameter:
    """A parameter with its annotation as an object; the module postpones them as text."""
    hint = parameter.annotation
    names = getattr(command, "__globals__", {})
    return parameter.replace(annotation=eval(hint, names) if isinstance(hint, str) else hint)


def _parse_json(flag: Flag, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(flag.setting, value, f"not JSON ({error}).", "Quote it for the shell.") from error


# --- one line of help a field, from the class's docstring ------------------------------------------


def field_help(cls: type) -> dict[str, str]:
    """Field to its line in the ``Attributes:`` of the class or of its bases."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = re.search(r"Attributes:\n(.*?)(?:\n\s*\n|\Z)", inspect.getdoc(base) or "", re.DOTALL)
        if section is None or base.__module__.split(".")[0] != "recurra":
            continue
        for entry in re.split(r"\n    (?=\w)", "\n" + section.group(1)):
            names, _, text = entry.partition(":")
            line = " ".join(text.split())
            line = line.replace("``", "").rstrip(".")
            found |= {name.strip(): line[:1].upper() + line[1:] for name in names.split(",") if line}
    return found


# --- types that a command line can parse -----------------------------------------------------------


def _flag_type(annotation: Any) -> tuple[Any, bool]:
    """(type to parse, whether it is JSON) of a field's annotation."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        many = next((a for a in inner if _is_sequence(a)), None)
        parsed, is_json = _flag_type(many or inner[0])
        return parsed | None, is_json
    if annotation is SecretStr:
        return str, False
    if _is_sequence(annotation):
        element, _ = _flag_type(get_args(annotation)[0])
        return list[element], False  # type: ignore[valid-type]
    if annotation is dict or get_origin(annotation) in (dict, Mapping) or _is_mapping(annotation):
        return str, True
    return annotation, False


def _is_sequence(annotation: Any) -> bool:
    origin = get_origin(annotation)
    return (isinstance(origin, type) and issubclass(origin, (tuple, list))) or _named(origin, "Sequence")


def _is_mapping(annotation: Any) -> bool:
    return _named(get_origin(annotation), "Mapping")


def _named(origin: Any, name: str) -> bool:
    return getattr(origin, "__name__", "") == name


def _plain_default(default: Any) -> Any:
    """Empty containers are no default worth showing."""
    return None if isinstance(default, tuple | list | dict | Mapping) and not default else default


def model_flags(cls: type[BaseModel], skip: tuple[str, ...] = ()) -> list[Flag]:
    """Flags of a pydantic model's own fields; nested models are left to the caller."""
    helps = field_help(cls)
    flags = []
    for name, field in cls.model_fields.items():
        if name in skip:
            continue
        parsed, is_json = _flag_type(field.annotation)
        default = _plain_default(field.get_default(call_default_factory=True))
        if default is None and type(None) not in get_args(parsed):
            parsed = parsed | None
        flags.append(Flag(name, flag_name(name), parsed, default, helps.get(name, ""), is_json))
    return flags


def dataclass_flags(cls: Any, skip: tuple[str, ...] = (), **defaults: Any) -> list[Flag]:
    """Flags of a dataclass's fields; ``defaults`` replace its own."""
    helps, hints = field_help(cls), typing.get_type_hints(cls)
    flags = []
    for field in dataclasses.fields(cls):
        if field.name in skip:
            continue
        parsed, is_json = _flag_type(hints[field.name])
        own = None if field.default is dataclasses.MISSING else field.default
        default = _plain_default(defaults.get(field.name, own))
        if default is None and type(None) not in get_args(parsed):
            parsed = parsed | None
        flags.append(
            Flag(field.name, flag_name(field.name), parsed, default, helps.get(field.name, ""), is_json)
        )
    return flags


def construct(cls: type[BaseModel], values: dict[str, Any]) -> Any:
    """An object of ``cls``.

    Raises:
        ConfigError: the first value that it refuses.
    """
    try:
        return cls(**values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        if isinstance(cause, ConfigError):
            raise cause from None
        name = ".".join(str(part) for part in first["loc"])
        raise ConfigError(name, first.get("input"), f"{first['msg']}.") from None


# --- the groups --------------------------------------------------------------------------------------


def engine_flags(skip: tuple[str, ...] = ()) -> FlagGroup:
    """Every keyword of ``LLM(...)`` but ``model``, with vLLM's names for those of ``MambaConfig``."""
    from recurra.config.engine import EngineConfig
    from recurra.config.mamba import MambaConfig

    own = model_flags(EngineConfig, ("model", "mamba_config", *skip))
    mamba = model_flags(MambaConfig)
    names = {flag.setting for flag in mamba}

    def build(values: dict[str, Any]) -> dict[str, Any]:
        given = {k: v for k, v in values.items() if k in names}
        settings = {k: v for k, v in values.items() if k not in names}
        changed = any(given.get(flag.setting) != flag.default for flag in mamba)
        return {**settings, "mamba_config": construct(MambaConfig, given)} if changed else settings

    return FlagGroup("Model and engine", (*own, *mamba), build)


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the command line says of sampling, until the model's own defaults are known.

    Attributes:
        given: fields whose flag was given.
        own: the command's defaults of the other flags.
    """

    given: Mapping[str, Any]
    own: Mapping[str, Any]

    def params(self, model_defaults: Mapping[str, Any]) -> SamplingParams:
        """Flags first, then the model's defaults, then the command's.

        Raises:
            RequestError: a field out of its range.
        """
        from recurra.engine.generation import merged

        return SamplingParams(**merged({**self.own, **model_defaults}, self.given))


def sampling_flags(skip: tuple[str, ...] = (), **defaults: Any) -> FlagGroup:
    """Every field of ``SamplingParams``."""
    flags = dataclass_flags(SamplingParams, skip, **defaults)
    own = {flag.setting: flag.default for flag in flags if flag.default is not None}

    def build(values: dict[str, Any]) -> Sampling:
        SamplingParams(**{**own, **values})  # what can't work is refused before a model loads
        return Sampling(values, own)

    title = "Sampling (the model's generation_config.json goes before these defaults)"
    return FlagGroup(title, tuple(flags), build, given_only=True)


def server_flags() -> FlagGroup:
    """Every field of ``ServerConfig`` that the engine doesn't have itself."""
    from recurra.config.server import ServerConfig

    flags = [
        replace(flag, env_var="RECURRA_API_KEY") if flag.setting == "api_keys" else flag
        for flag in model_flags(ServerConfig, ("max_queue_len",))
    ]

    def build(values: dict[str, Any]) -> Any:
        given: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return construct(ServerConfig, given)

    return FlagGroup("Server", tuple(flags), build)
