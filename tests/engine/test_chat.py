"""Chat templates render as transformers renders them, and in a sandbox."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import tokenizer_factories as made
from recurra.engine.chat import ChatTemplate, load_chat_template
from recurra.engine.tokenizer import Tokenizer
from recurra.errors import CheckpointError, ConfigError, RequestError

TURNS = """
{%- for message in messages %}
    {{- '<|turn|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}
"""
TEMPLATES = {
    "turns": TURNS,
    "loops": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{{ m.role | upper }}: {{ m.content | trim }}{% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}""",
    "names": "{{ bos_token }}{{ messages | length }}{{ eos_token }}{{ thinking | default('off') }}",
    "parts": """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m['content'] %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endif %}{% endfor %}""",
    "namespace": """{% set ns = namespace(system='') %}{% for m in messages if m.role == 'system' %}
{% set ns.system = m.content %}{% endfor %}<<{{ ns.system }}>>{% for m in messages if m.role != 'system' %}
{{ m.content }}{% endfor %}""",
    "json": """{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}
{{ tools | tojson if tools else 'no tools' }}""",
    "generation": """{% for m in messages %}{% if m.role == 'assistant' %}
{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}
{{ m.content }}{% endif %}{% endfor %}""",
    "date": "{{ strftime_now('%Y-%m') }}{% for m in messages %}{{ m.content }}{% endfor %}",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello <b>& naïve</b>"}],
    "system": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "yes", "tool_calls": None},
        {"role": "user", "content": "日本 😀"},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def write(folder: Path, chat_template: Any) -> Path:
    return made.save(
        folder,
        made.byte_level_bpe(),
        tokenizer_config={"bos_token": made.END, "eos_token": made.TURN, "chat_template": chat_template},
    )


def load(folder: Path, **kwargs: Any) -> Tokenizer:
    tok = Tokenizer.from_folder(folder, **kwargs)
    assert tok is not None
    return tok


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tokenizer, Any]]:
    from transformers import PreTrainedTokenizerFast

    found = {}
    for name, text in TEMPLATES.items():
        folder = write(tmp_path_factory.mktemp(name), text)
        found[name] = load(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    return found


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("generation", [True, False])
def test_equals_transformers(
    folders: dict[str, tuple[Tokenizer, Any]], template: str, chat: str, generation: bool
) -> None:
    ours, theirs = folders[template]
    options: dict[str, Any] = {"tools": TOOLS} if template == "json" else {}
    if template == "names":
        options["thinking"] = "on"
    expected = theirs.apply_chat_template(
        CHATS[chat], tokenize=False, add_generation_prompt=generation, **options
    )
    assert ours.render_chat(CHATS[chat], add_generation_prompt=generation, **options) == expected
    ids = theirs.apply_chat_template(
        CHATS[chat], add_generation_prompt=generation, return_dict=False, **options
    )
    assert ours.chat(CHATS[chat], add_generation_prompt=generation, **options) == ids


def test_parts_are_joined_unless_the_template_reads_them(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert load(write(tmp_path / "1", TEMPLATES["parts"])).render_chat(chat) == "[text:a][text:b]"
    assert "user\na\nb<|end|>" in load(write(tmp_path / "2", TURNS)).render_chat(chat)


SILENT = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}


def test_final_message_can_be_continued(folders: dict[str, tuple[Tokenizer, Any]]) -> None:
    ours, theirs = folders["turns"]
    chat = [*CHATS["one"], {"role": "assistant", "content": "I think that"}]
    text = ours.render_chat(chat, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nI think that")
    assert text == theirs.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    with pytest.raises(RequestError, match="exclude each other"):
        ours.render_chat(chat, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RequestError, match="no content"):
        ours.render_chat([SILENT], add_generation_prompt=False, continue_final_message=True)


def test_only_a_message_that_calls_tools_may_say_nothing(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}{% if m.content is defined %}:{{ m.content }}{% endif %}]{% endfor %}"
    ours = load(write(tmp_path, template))
    assert ours.render_chat([*CHATS["one"], SILENT]).endswith("[assistant]")
    assert ours.render_chat([*CHATS["one"], {**SILENT, "content": None}]).endswith("[assistant]")
    assert ours.render_chat([{"role": "user", "content": ""}]) == "[user:]"


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ("hello", "at least one message"),
        (["hello"], "role"),
        ([{"content": "x"}], "role"),
        ([{"role": "user", "content": 3}], "content must be text"),
        ([{"role": "user"}], "content is missing from a message of role 'user'"),
        ([{"role": "user", "content": None}], "content is missing"),
        ([{"role": "user", "content": [], "tool_calls": [{}]}], "content is missing"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "content is missing"),
        ([{"role": "user", "content": [{"type": "text"}]}], "without text"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "without text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'"),
    ],
)
def test_bad_messages_are_refused(
    folders: dict[str, tuple[Tokenizer, Any]], messages: Any, problem: str
) -> None:
    with pytest.raises(RequestError, match=problem):
        folders["turns"][0].chat(messages)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
    ],
)
def test_templates_run_in_a_sandbox(attack: str) -> None:
    with pytest.raises(RequestError, match=r"unsafe|refused"):
        ChatTemplate({"default": attack}, {}, "test").render(CHATS["one"])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.x }}", "refused"),
        ("{{ messages[0].content + 1 }}", "failed on these messages"),
        ("{{ 1 / 0 }}", "failed on these messages"),
    ],
)
def test_failures_of_a_template_are_the_requests(template: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem) as caught:
        ChatTemplate({"default": template}, {}, "test").render(CHATS["one"])
    assert caught.value.status == 400


def test_invalid_template_names_its_source_and_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"line 2.*"):
        load(write(tmp_path, "a\n{% for %}"))


def test_without_a_template_the_error_says_how_to_give_one(tmp_path: Path) -> None:
    tok = load(write(tmp_path, None))
    with pytest.raises(RequestError, match="--chat-template") as caught:
        tok.chat(CHATS["one"])
    assert caught.value.code == "no_chat_template"


def test_places_of_templates(tmp_path: Path) -> None:
    def text(folder: Path, **options: Any) -> str:
        return load(folder).render_chat(CHATS["one"], **options)

    named = write(
        tmp_path / "named",
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}],
    )
    assert (text(named), text(named, tools=TOOLS)) == ("plain", "tools")
    (named / "chat_template.jinja").write_text("file")
    assert text(named) == "file"
    (named / "additional_chat_templates").mkdir()
    (named / "additional_chat_templates" / "tool_use.jinja").write_text("extra")
    assert text(named, tools=TOOLS) == "extra"
    legacy = write(tmp_path / "legacy", None)
    (legacy / "chat_template.json").write_text(json.dumps({"chat_template": "old"}))
    assert text(legacy) == "old"
    odd = write(tmp_path / "odd", [{"name": "rag", "template": "x"}])
    with pytest.raises(RequestError, match="rag"):
        text(odd)
    broken = write(tmp_path / "broken", [{"name": "default"}])
    with pytest.raises(CheckpointError, match="template"):
        load(broken)


def test_users_template_wins(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", TURNS)
    file = tmp_path / "mine.jinja"
    file.write_text("mine {{ messages[0].role }}")
    assert load(folder, chat_template=file).render_chat(CHATS["one"]) == "mine user"
    assert load(folder, chat_template=str(file)).render_chat(CHATS["one"]) == "mine user"
    assert load(folder, chat_template="in {{ bos_token }}").render_chat(CHATS["one"]) == f"in {made.END}"
    with pytest.raises(ConfigError, match=r"chat_template='nowhere.jinja'"):
        load_chat_template(folder, {}, {}, "nowhere.jinja")


def test_strftime_now_is_today() -> None:
    before = datetime.now()
    text = ChatTemplate({"default": "{{ strftime_now('%Y-%m-%d') }}"}, {}, "t").render(CHATS["one"])
    assert text in (before.strftime("%Y-%m-%d"), datetime.now().strftime("%Y-%m-%d"))
