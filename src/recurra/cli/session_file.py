"""``recurra chat --session NAME``: a conversation and the model's state of it, kept between runs."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recurra.cli.console import note
from recurra.cli.conversation import Conversation
from recurra.errors import ConfigError, RequestError, StateError

if TYPE_CHECKING:
    from recurra.engine.engine import LLMEngine
    from recurra.types import RequestOutput

_NAME = re.compile(r"[\w.-]{1,100}")


@dataclass(frozen=True, slots=True)
class SessionFile:
    """Two files: what was said, and what the model remembers of it. The first is enough to go on."""

    texts: Path
    state: Path

    @classmethod
    def named(cls, name: str) -> SessionFile:
        """A session in the user's data folder, or at a path of the user's.

        Raises:
            ConfigError: the name is neither, or its folder can't be made.
        """
        if "/" in name:
            base = Path(name).expanduser()
        elif _NAME.fullmatch(name) and name.strip("."):
            base = Path.home() / ".local" / "share" / "recurra" / "sessions" / name
        else:
            raise ConfigError(
                "session", name, "no name of a session.", "Use letters, digits, '.', '_' and '-', or a path."
            )
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("session", name, f"{base.parent} can't be made ({error.strerror}).") from error
        return cls(base.with_name(base.name + ".json"), base.with_name(base.name + ".safetensors"))

    def resume(self, engine: LLMEngine, conversation: Conversation, quiet: bool) -> None:
        """Go on with what was said, from the state where it can be used.

        Raises:
            ConfigError: the file of texts is damaged.
        """
        if not self.texts.is_file():
            return
        try:
            record = json.loads(self.texts.read_text(encoding="utf-8"))
            conversation.turns.extend({"role": m["role"], "content": m["content"]} for m in record["turns"])
            conversation.system = conversation.system or record["system"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "session", str(self.texts), f"can't be read ({error}).", "Remove it, or use another name."
            ) from error
        from recurra.engine.sessions import State, load_state

        try:
            load_state(engine, State.load(self.state))
            note(f"[{len(conversation.turns)} messages, resumed from {self.state}]", quiet)
        except (StateError, RequestError) as error:
            note(f"[{len(conversation.turns)} messages; they are read anew: {error}]", quiet)

    def keep(self, engine: LLMEngine, conversation: Conversation, output: RequestOutput) -> None:
        """Write both files, each whole or not at all."""
        from recurra.engine.sessions import save_state

        record = {"model": conversation.model, "system": conversation.system, "turns": conversation.turns}
        draft = self.texts.with_name(f".{self.texts.name}.{os.getpid()}.tmp")
        try:
            draft.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            os.replace(draft, self.texts)
            save_state(engine, output, 0, None).save(self.state)
        except (OSError, RequestError) as error:
            note(f"[the session could not be saved: {error}]")
