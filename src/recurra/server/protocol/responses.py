"""``POST /v1/responses``: what OpenAI's client sends."""

from __future__ import annotations

from typing import Any

from recurra.errors import RequestError
from recurra.server.protocol.base import Int
from recurra.server.protocol.chat import ChatMessage
from recurra.server.protocol.sampling import SamplingFields


class InputItem(ChatMessage):
    """A message of the input."""

    type: str | None = None


class ResponseRequest(SamplingFields):
    """A turn: new input, and what it goes on from."""

    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: Int | None = None
    metadata: dict[str, str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    include: list[str] | None = None
    background: bool | None = None

    def check_supported(self) -> None:
        """Refuse what would change the answer if it were honoured.

        Raises:
            RequestError: 400, naming the field.
        """
        form = (self.text or {}).get("format") or {"type": "text"}
        wrong = {
            "text": form.get("type") != "text",
            "reasoning": bool((self.reasoning or {}).get("effort") not in (None, "none")),
            "include": bool(self.include),
            "background": bool(self.background),
            "truncation": self.truncation not in (None, "disabled"),
            "n": self.n not in (None, 1),
            "prompt_logprobs": self.prompt_logprobs is not None,
        }
        for name, refused in wrong.items():
            if refused:
                raise RequestError(
                    f"{name}: {getattr(self, name)!r:.80} is not supported by this server; leave it out",
                    param=name, code="unsupported_field",
                )  # fmt: skip
        if not self.input:
            raise RequestError("input is empty; give a text or messages", param="input")

    def new_messages(self) -> list[dict[str, Any]]:
        """The input as turns for the chat template.

        Raises:
            RequestError: 400, an item that is no text.
        """
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found = []
        for number, item in enumerate(self.input):
            if item.type not in (None, "message"):
                raise RequestError(
                    f"input[{number}].type: {item.type!r:.40} is not supported; use messages",
                    param="input", code="unsupported_content",
                )  # fmt: skip
            found.append(item.plain(f"input[{number}]"))
        return found
