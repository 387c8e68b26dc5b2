"""Fields of OpenAI, vLLM and others that no body here declares: harmless ones, and refused ones."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Set
from typing import Any

from recurra.errors import RequestError

#: Accepted and without effect on the answer.
HARMLESS = frozenset({
    "user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls", "prediction", "request_id",
})  # fmt: skip


def _off(value: Any) -> bool:
    return not value


def _only(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value in allowed


def _text_format(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") == "text"


#: Known fields that can't be honoured, each with the values that ask for nothing.
REFUSED: Mapping[str, Callable[[Any], bool]] = {
    "suffix": _off,
    "tools": _off,
    "tool_choice": _only("none", "auto"),
    "functions": _off,
    "function_call": _only("none", "auto"),
    "response_format": _text_format,
    "modalities": _only(["text"]),
    "audio": _off,
    "web_search_options": _off,
    "reasoning_effort": _only("none"),
    "verbosity": _only("medium"),
    "use_beam_search": _off,
    "length_penalty": _only(1, 1.0),
    "best_of": _only(1),
    "guided_json": _off,
    "guided_regex": _off,
    "guided_choice": _off,
    "guided_grammar": _off,
    "structured_outputs": _off,
    "logits_processors": _off,
    "allowed_token_ids": _off,
    "truncate_prompt_tokens": _off,
    "prompt_embeds": _off,
    "mm_processor_kwargs": _off,
    "kv_transfer_params": _off,
    "spaces_between_special_tokens": _only(True),
    "chat_template": _off,
    "documents": _off,
    "logprob_token_ids": _off,
    "top_a": _off,
    "typical_p": _only(1, 1.0),
    "mirostat": _off,
    "mirostat_mode": _off,
    "grammar": _off,
    "json_schema": _off,
}


def check_extra(extra: Mapping[str, Any], declared: Set[str], ignore_unknown: bool) -> None:
    """Refuse fields that would change the answer if they were honoured, and aren't.

    Args:
        extra: the fields that the body's schema doesn't declare.
        declared: the fields that it does, to suggest from.
        ignore_unknown: let fields pass that are in no table.

    Raises:
        RequestError: 400, naming the field.
    """
    for name, value in extra.items():
        if value is None or name in HARMLESS:
            continue
        if name in REFUSED:
            if not REFUSED[name](value):
                raise RequestError(
                    f"{name} is not supported by this server; leave it out",
                    param=name,
                    code="unsupported_field",
                )
        elif not ignore_unknown:
            near = difflib.get_close_matches(name, declared, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            shown = name if len(name) <= 64 else name[:64] + "..."
            raise RequestError(
                f"unrecognized request argument: {shown}{hint}", param=shown, code="unknown_field"
            )
