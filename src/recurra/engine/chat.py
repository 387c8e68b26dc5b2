"""Chat templates: a list of messages to the one prompt text that a model was taught.

Templates come with strangers' checkpoints, so they run in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from recurra.errors import CheckpointError, ConfigError, RequestError

Message = Mapping[str, Any]

NO_TEMPLATE = (
    "this model has no chat template: neither chat_template.jinja nor tokenizer_config.json gives one. "
    "Give yours with --chat-template (or LLM(chat_template=...)), a Jinja file or the template itself, "
    "or send a plain prompt."
)
_MARK = "\ue000continue\ue000"


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks answers for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own protocol

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002 - templates may name it
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template reads ``content`` as a list of parts."""
    for loop in tree.find_all(nodes.For):
        if isinstance(loop.iter, nodes.Name) and loop.iter.name == "content":
            return True
        for read in (loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem))):
            if isinstance(read, nodes.Getattr) and read.attr == "content":
                return True
            if isinstance(read, nodes.Getitem) and read.arg == nodes.Const("content"):
                return True
    return False


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") in ("text", "input_text", "output_text"):
        text = part.get("text")
        if not isinstance(text, str):
            raise RequestError(f"messages: a content part without text: {part!r:.200}", param="messages")
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"messages: a content part of type {kind!r}; this model reads text parts only", param="messages"
    )


def _plain_message(message: Any, keep_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages: each is an object with a role and content, got {message!r:.200}", param="messages"
        )
    # Templates test for a missing key, and print "None" for one that is null.
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if content is None or content in ([], ()):
        _require_calls(plain)
    if isinstance(content, Sequence) and not isinstance(content, str):
        texts = [_part_text(part) for part in content]
        plain["content"] = [{"type": "text", "text": t} for t in texts] if keep_parts else "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"messages: content must be text or a list of text parts, got {content!r:.200}", param="messages"
        )
    return plain


def _require_calls(message: Mapping[str, Any]) -> None:
    """Refuse a message that says nothing: only an assistant's that calls tools needs no content."""
    if message["role"] == "assistant" and (message.get("tool_calls") or message.get("function_call")):
        return
    raise RequestError(
        f"messages: content is missing from a message of role {message['role']!r:.40}; only an assistant's "
        "message with tool_calls may leave it out",
        param="messages",
    )


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + _MARK
    elif content:
        content[-1] = {**content[-1], "text": content[-1]["text"] + _MARK}
    else:
        raise RequestError("continue_final_message: the last message has no content", param="messages")


class ChatTemplate:
    """A checkpoint's chat templates, compiled.

    Args:
        templates: name to Jinja source; "default" is used, or "tool_use" where tools are given.
        special_tokens: ``bos_token``, ``eos_token`` ..., which templates name.
        source: where the templates come from, for messages.

    Raises:
        CheckpointError: a template that is no valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._compiled: dict[str, tuple[jinja2.Template, bool]] = {}
        for name, text in templates.items():
            try:
                parts = _loops_over_content(environment.parse(text))
                self._compiled[name] = environment.from_string(text), parts
            except jinja2.TemplateSyntaxError as error:
                raise CheckpointError(
                    f"chat template of {source}, line {error.lineno}: {error.message}"
                ) from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """The prompt text of ``messages``.

        Args:
            messages: objects with ``role`` and ``content`` (text, or a list of text parts).
            add_generation_prompt: end with the opening of the model's answer.
            continue_final_message: end inside the last message, so that the model continues it.
            tools, documents: handed to the template.
            template_kwargs: further names for the template.

        Raises:
            RequestError: no messages, a message of another form, or the template refuses them.
        """
        if isinstance(messages, str | Mapping) or not messages:
            raise RequestError("messages: a list of at least one message is needed", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one to false",
                param="continue_final_message",
            )
        template, keep_parts = self._choose(bool(tools))
        plain = [_plain_message(message, keep_parts) for message in messages]
        if continue_final_message:
            _mark_end(plain[-1])
        names = {
            **self._special_tokens,
            **template_kwargs,
            "messages": plain,
            "tools": list(tools) if tools is not None else None,
            "documents": list(documents) if documents is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(template, names)
        return _cut_at_mark(text) if continue_final_message else text

    def _choose(self, tools: bool) -> tuple[jinja2.Template, bool]:
        if tools and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        if "default" in self._compiled:
            return self._compiled["default"]
        names = ", ".join(sorted(self._compiled))
        raise RequestError(f'no chat template is named "default" in {self.source}; there are: {names}')

    def _render(self, template: jinja2.Template, names: dict[str, Any]) -> str:
        try:
            return template.render(names)
        except jinja2.exceptions.SecurityError as error:
            raise RequestError(f"the chat template tried something unsafe: {error}") from error
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused: {error}", param="messages") from error
        except (TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise RequestError(
                f"the chat template failed on these messages: {error}", param="messages"
            ) from error


def _cut_at_mark(text: str) -> str:
    end = text.rfind(_MARK)
    if end < 0:
        raise RequestError(
            "continue_final_message: the chat template leaves out the last message's end", param="messages"
        )
    return text[:end]


def _is_inline(given: str) -> bool:
    return any(mark in given for mark in ("{%", "{{", "{#", "\n"))


def _given(chat_template: str | Path) -> tuple[str, str]:
    """(source text, where from) of what the user gave."""
    if isinstance(chat_template, str) and _is_inline(chat_template):
        return chat_template, "--chat-template"
    path = Path(chat_template).expanduser()
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "chat_template", str(chat_template), f"neither a template nor a readable file ({error}).",
            "Give the path of a Jinja file, or the template itself (it contains '{{' or '{%').",
        ) from error  # fmt: skip


def _from_folder(folder: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: files first, as they are the newer place."""
    found: dict[str, str] = {}
    configured = tokenizer_config.get("chat_template")
    if isinstance(configured, str):
        found["default"] = configured
    elif isinstance(configured, list):
        found |= {entry["name"]: entry["template"] for entry in configured}
    legacy = folder / "chat_template.json"
    if legacy.is_file():
        found["default"] = json.loads(legacy.read_text(encoding="utf-8"))["chat_template"]
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    main = folder / "chat_template.jinja"
    if main.is_file():
        found["default"] = main.read_text(encoding="utf-8")
    return found


def load_chat_template(
    folder: Path,
    tokenizer_config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    chat_template: str | Path | None = None,
) -> ChatTemplate | None:
    """The chat template of a checkpoint folder, or the user's; None where there is none.

    Args:
        folder: the checkpoint's folder.
        tokenizer_config: content of its ``tokenizer_config.json``.
        special_tokens: names for the template.
        chat_template: the user's own: a file, or Jinja text.

    Raises:
        ConfigError: ``chat_template`` is neither a file nor a template.
        CheckpointError: a template that can't be read or compiled.
    """
    if chat_template is not None:
        text, source = _given(chat_template)
        return ChatTemplate({"default": text}, special_tokens, source)
    try:
        templates = _from_folder(folder, tokenizer_config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"chat template of {folder} can't be read: {error!r}") from error
    return ChatTemplate(templates, special_tokens, str(folder)) if templates else None
