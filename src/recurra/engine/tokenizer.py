"""Text to token ids and back, from a checkpoint folder's ``tokenizer.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from recurra.engine.chat import NO_TEMPLATE, ChatTemplate, Message, load_chat_template
from recurra.engine.decoding import Piece, compile_decoding, decode_window
from recurra.engine.detokenizer import Detokenizer
from recurra.errors import CheckpointError, MissingDependencyError, RequestError

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
#: Older vocabularies, from which ``transformers`` can make a ``tokenizer.json``.
_CONVERTIBLE = ("tokenizer.model", "spiece.model", "vocab.json", "tokenizer.model.v3", "tekken.json")


class Tokenizer:
    """A checkpoint's tokenizer.

    Args:
        backend: the ``tokenizers`` object.
        special_tokens: ``bos_token`` ... to the token itself.
        bos_token_id: the id that begins a text, or None.
        eos_token_ids: every id that ends an answer.
        chat_template: how a chat becomes a prompt; None where the model has none.
        add_bos, add_eos: what ``add_special_tokens`` adds where tokenizer.json's post-processor adds nothing.
    """

    def __init__(
        self,
        backend: FastTokenizer,
        special_tokens: Mapping[str, str],
        bos_token_id: int | None,
        eos_token_ids: frozenset[int],
        chat_template: ChatTemplate | None = None,
        add_bos: bool = False,
        add_eos: bool = False,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template
        self.decoding = compile_decoding(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._pieces: dict[int, Piece | None] = {}
        self._before = self._configured_end(add_bos, self.bos_token_id)
        self._after = self._configured_end(add_eos, self.eos_token_id)

    @classmethod
    def from_folder(
        cls,
        path: Path | str,
        chat_template: str | Path | None = None,
        model_path: Path | str | None = None,
    ) -> Tokenizer | None:
        """Read the tokenizer of a folder; None where it has none (token ids in and out).

        Args:
            path: the folder with ``tokenizer.json``.
            chat_template: the user's chat template, a file or Jinja text; None reads the folder's.
            model_path: the checkpoint's folder, when the tokenizer lies elsewhere.

        Raises:
            CheckpointError: a file that can't be read, or that contradicts another.
            MissingDependencyError: an older vocabulary, which ``transformers`` would convert.
            ConfigError: ``chat_template`` is neither a file nor a template.
        """
        folder = Path(path)
        backend = _load_backend(folder)
        if backend is None:
            return None
        config = _read_json(folder / "tokenizer_config.json")
        named = _special_tokens(_read_json(folder / "special_tokens_map.json") | config)
        _register(backend, config, named, folder)
        model_folder = Path(model_path) if model_path is not None else folder
        generation = _read_json(model_folder / "generation_config.json")
        model = _read_json(model_folder / "config.json")
        single = {name: token for name, token in named.items() if name in _NAMED}
        return cls(
            backend,
            single,
            _bos(backend, single, generation, model),
            _eos(backend, single, generation, model),
            load_chat_template(folder, config, single, chat_template),
            add_bos=bool(config.get("add_bos_token")),
            add_eos=bool(config.get("add_eos_token")),
        )

    def check_vocab(self, model_vocab_size: int) -> None:
        """Refuse a vocabulary larger than the model's; a smaller one is the model's padding.

        Raises:
            CheckpointError: the tokenizer makes ids that the model has no embedding for.
        """
        if self.vocab_size > model_vocab_size:
            raise CheckpointError(
                f"wrong vocabulary: the tokenizer makes token ids up to {self.vocab_size - 1}, but the model "
                f"has {model_vocab_size} embeddings. Give the tokenizer that belongs to this model."
            )

    @property
    def eos_token_id(self) -> int | None:
        """The end token by name, else the lowest of ``eos_token_ids``."""
        token = self.special_tokens.get("eos_token")
        named = self.backend.token_to_id(token) if token is not None else None
        return named if named is not None else min(self.eos_token_ids, default=None)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``.

        Args:
            text: any Unicode text.
            add_special_tokens: add what the model was taught to see around a text (a BOS, say).

        Raises:
            RequestError: lone surrogates, which no UTF-8 holds.
        """
        try:
            ids = list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is no valid Unicode: {error}", param="prompt") from error
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; ids without a token add nothing.

        Runs of ``<0x..>`` byte tokens keep their whole characters and turn each other byte into U+FFFD.
        """
        if self.decoding.kind != "pieces":
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        stream = Detokenizer(self, skip_special_tokens)
        for token_id in ids:
            stream.push(token_id)
        stream.flush()
        return stream.text

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> str:
        """Prompt text of a chat, see :meth:`ChatTemplate.render`.

        Raises:
            RequestError: the model has no chat template, or it refuses the messages.
        """
        if self.chat_template is None:
            raise RequestError(NO_TEMPLATE, param="messages", code="no_chat_template")
        return self.chat_template.render(messages, add_generation_prompt, **template_kwargs)

    def chat(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a chat; the template alone says which special tokens it has."""
        text = self.render_chat(messages, add_generation_prompt, **template_kwargs)
        return self.encode(text, add_special_tokens=False)

    def piece(self, token_id: int) -> Piece | None:
        """The token's part of the text; None for an id without a token."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self.backend.id_to_token(token_id) if token_id >= 0 else None
            found = self.decoding.piece(token) if token is not None else None
            self._pieces[token_id] = found
            return found

    def token_to_string(self, token_id: int) -> str:
        """The token as text, special ones too; part of a character shows as U+FFFD."""
        piece = self.piece(token_id)
        if piece is None:
            return ""
        if self.decoding.kind == "window":
            return decode_window(self.backend, [token_id])
        return piece.data.decode(errors="replace")

    def token_to_bytes(self, token_id: int) -> bytes:
        """The token's bytes, which may be part of a character."""
        piece = self.piece(token_id)
        if piece is None:
            return b""
        return self.token_to_string(token_id).encode() if self.decoding.kind == "window" else piece.data

    def _configured_end(self, wanted: bool, token_id: int | None) -> tuple[int, ...]:
        """What the flag adds at one end of a text; a post-processor that adds tokens has the only say."""
        if not wanted or token_id is None or self.backend.num_special_tokens_to_add(False):
            return ()
        return (token_id,)


def _read_json(path: Path) -> dict[str, Any]:
    """An object from a file that may be absent."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def _load_backend(folder: Path) -> FastTokenizer | None:
    path = folder if folder.is_file() else folder / "tokenizer.json"
    if path.is_file():
        try:
            backend = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise CheckpointError(f"{path} is no valid tokenizer: {error}") from error
    else:
        found = [name for name in _CONVERTIBLE if (folder / name).is_file()]
        if not found:
            return None
        backend = _convert(folder, found[0])
    # Training settings that some files carry: a prompt is never cut or padded here.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _convert(folder: Path, file: str) -> FastTokenizer:
    """Let ``transformers`` build a fast tokenizer from an older vocabulary file."""
    purpose = f"{folder} has {file} but no tokenizer.json; converting it"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError("transformers", purpose, "transformers") from error
    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        backend: FastTokenizer = slow.backend_tokenizer
    except Exception as error:  # whatever a stranger's files provoke in there
        raise CheckpointError(
            f"{folder} has {file} but no tokenizer.json, and transformers can't convert it: {error}. "
            "Add the model's tokenizer.json, or set skip_tokenizer_init to work with token ids."
        ) from error
    return backend


def _content(token: Any) -> str | None:
    """A token given as text or as an object with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Name to token; tokens without a name of their own are numbered."""
    found = {name: _content(config.get(name)) for name in _NAMED}
    for name in _LISTED:
        listed = config.get(name) or []
        if isinstance(listed, Mapping):
            found |= {key: _content(token) for key, token in listed.items()}
        else:
            found |= {f"{name}[{i}]": _content(token) for i, token in enumerate(listed)}
    return {name: token for name, token in found.items() if token is not None}


def _declared(config: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    for key, entry in sorted((config.get("added_tokens_decoder") or {}).items(), key=lambda kv: int(kv[0])):
        flags = {k: bool(entry.get(k, False)) for k in ("special", "single_word", "lstrip", "rstrip")}
        normalized = bool(entry.get("normalized", not flags["special"]))
        yield int(key), AddedToken(entry["content"], normalized=normalized, **flags)


def _register(
    backend: FastTokenizer, config: Mapping[str, Any], named: Mapping[str, str], folder: Path
) -> None:
    """Make known the special tokens that the configuration names beyond tokenizer.json."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    for token_id, token in _declared(config):
        if token.content not in known or (token.special and not known[token.content].special):
            _add(backend, [token])
            known[token.content] = token
        if backend.token_to_id(token.content) != token_id:
            raise CheckpointError(
                f"{folder}: tokenizer_config.json gives {token.content!r} the id {token_id}, "
                f"tokenizer.json {backend.token_to_id(token.content)}"
            )
    missing = [
        AddedToken(content, special=True, normalized=False)
        for content in dict.fromkeys(named.values())
        if not (content in known and known[content].special) and backend.token_to_id(content) is not None
    ]
    _add(backend, missing)


def _add(backend: FastTokenizer, tokens: list[AddedToken]) -> None:
    for token in tokens:
        (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _ids(value: Any) -> Iterable[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _token_id(backend: FastTokenizer, named: Mapping[str, str], name: str) -> list[int]:
    found = backend.token_to_id(named[name]) if name in named else None
    return [] if found is None else [int(found)]


def _bos(
    backend: FastTokenizer, named: Mapping[str, str], generation: Mapping[str, Any], model: Mapping[str, Any]
) -> int | None:
    candidates = [
        *_token_id(backend, named, "bos_token"),
        *_ids(generation.get("bos_token_id")),
        *_ids(model.get("bos_token_id")),
    ]
    return candidates[0] if candidates else None


def _eos(
    backend: FastTokenizer, named: Mapping[str, str], generation: Mapping[str, Any], model: Mapping[str, Any]
) -> frozenset[int]:
    """Ids that end an answer: the tokenizer's own and those of generation_config.json.

    config.json speaks only where neither does: its ids are often a class's default, of another
    vocabulary.
    """
    ids = {*_token_id(backend, named, "eos_token"), *_ids(generation.get("eos_token_id"))}
    return frozenset(ids or _ids(model.get("eos_token_id")))
