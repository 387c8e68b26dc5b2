"""States that callers hold in their hands: taken from an engine, written to a file, given to any engine of
the same model.

>>> state = llm.save_state(llm.generate("Once upon a time")[0])
>>> state.save("story.safetensors")
>>> llm.generate([" The end", " But then"], state=State.load("story.safetensors"))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recurra.cache.prefix import Entry, pack
from recurra.cache.state_file import SavedState, read_state, write_state
from recurra.engine.prompts import check_ids, read_prompt
from recurra.engine.reuse import space_of_salt
from recurra.errors import RequestError, StateError
from recurra.sampling_params import SamplingParams
from recurra.types import PromptInput, RequestOutput

if TYPE_CHECKING:
    from recurra.engine.engine import LLMEngine

_REQUEST = "recurra-save-state"


class State:
    """What a model remembers of a text, and the text's tokens. It never changes.

    Attributes:
        saved: the tensors.
    """

    def __init__(self, saved: SavedState) -> None:
        self.saved = saved

    @property
    def token_ids(self) -> list[int]:
        """The text so far."""
        return list(self.saved.tokens)

    @property
    def num_computed(self) -> int:
        """How many of the tokens the state has seen; what continues it computes the others first."""
        return self.saved.position

    @property
    def nbytes(self) -> int:
        return self.saved.nbytes

    def save(self, path: str | Path) -> None:
        """Write it as a safetensors file, whole or not at all.

        Raises:
            OSError: the file can't be written.
        """
        write_state(Path(path), self.saved)

    @classmethod
    def load(cls, path: str | Path) -> State:
        """Read a file that :meth:`save` wrote.

        Raises:
            StateError: it is damaged, or no such file.
        """
        return cls(read_state(Path(path)))

    def fork(self) -> State:
        """Another hand on the same state. Continuing one changes no other: each request gets a copy."""
        return State(self.saved)

    def __repr__(self) -> str:
        return f"State({len(self.saved.tokens)} tokens, {self.nbytes} bytes)"


def save_state(engine: LLMEngine, source: RequestOutput | PromptInput, index: int, salt: str | None) -> State:
    """The state after a text; what of it isn't kept any more is computed.

    Raises:
        RequestError: the text is too short or can't be served, or the engine keeps no states.
    """
    if engine.cache is None:
        raise RequestError(
            "states are not kept by this engine; start it with enable_prefix_caching=True and memory for states",
            param="enable_prefix_caching",
        )
    tokens = _tokens_of(engine, source, index)
    space = space_of_salt(salt)
    entry = _find(engine, space, tokens)
    if entry is None:
        _compute(engine, tokens, salt)
        entry = _find(engine, space, tokens)
    saved = None if entry is None else engine.cache.tiers.saved(entry)
    if saved is None:
        raise RequestError("no memory is left to keep this state; raise prefix_cache_bytes")
    return State(SavedState(saved.fingerprint, tuple(tokens), saved.position, saved.row, saved.pages))


def load_state(engine: LLMEngine, state: State, salt: str | None = None) -> None:
    """Give an engine a state, so that what continues its text begins there.

    Raises:
        StateError: it is another model's.
        RequestError: the engine keeps no states.
    """
    cache, saved = engine.cache, state.saved
    if cache is None:
        raise RequestError(
            "state: this engine keeps no states; start it with enable_prefix_caching=True", param="state"
        )
    if saved.fingerprint != cache.fingerprint or saved.row.shape[0] != cache.tiers.rows.bytes_per_row:
        raise StateError(
            "this state is another model's, or of states in another layout or precision: it was saved by "
            f"{saved.fingerprint[:12]}, this engine is {cache.fingerprint[:12]}"
        )
    space, packed = space_of_salt(salt), pack(saved.tokens)
    found = cache.reuse.tree.lookup(space, packed, saved.position).entry
    if found is None or found.position < saved.position:
        entry = cache.reuse.tree.insert(space, packed, saved.position)
        cache.shelf.load(entry, saved.row, saved.pages)


def continued(engine: LLMEngine, state: State, prompt: PromptInput) -> dict[str, Any]:
    """A prompt that goes on after a state's text.

    Raises:
        RequestError: it is no prompt.
    """
    if isinstance(prompt, dict) and "prompt_token_ids" not in prompt:
        prompt = prompt.get("prompt", prompt)
    if isinstance(prompt, str) and engine.tokenizer is not None:
        ids: Sequence[int] = engine.tokenizer.encode(prompt, add_special_tokens=False) if prompt else ()
    else:
        _, ids = read_prompt(prompt, engine.tokenizer)
    return {"prompt_token_ids": [*state.saved.tokens, *ids]}


def _find(engine: LLMEngine, space: str, tokens: list[int]) -> Entry | None:
    """A kept state that has seen all of a text but its last token, or else all of it."""
    assert engine.cache is not None
    packed, last = pack(tokens), len(tokens) - 1
    for limit in (last, last + 1):
        entry = engine.cache.reuse.tree.lookup(space, packed, limit).entry
        if entry is not None and entry.position >= last:
            return entry
    return None


def _tokens_of(engine: LLMEngine, source: RequestOutput | PromptInput, index: int) -> list[int]:
    if isinstance(source, RequestOutput):
        if not 0 <= index < len(source.outputs):
            raise RequestError(f"index {index}: there are {len(source.outputs)} answers", param="index")
        tokens = [*source.prompt_token_ids, *source.outputs[index].token_ids]
    else:
        tokens = list(read_prompt(source, engine.tokenizer)[1])
    check_ids(tuple(tokens), engine.runner.model.vocab_size)
    if len(tokens) < 2:
        raise RequestError("a state is kept after two tokens at the earliest", param="prompt")
    return tokens


def _compute(engine: LLMEngine, tokens: list[int], salt: str | None) -> None:
    """Compute a text for its state's sake."""
    assert engine.cache is not None
    prompt: dict[str, Any] = {"prompt_token_ids": tokens}
    if salt is not None:
        prompt["cache_salt"] = salt
    reuse = engine.cache.reuse
    reuse.least_gain, usual = 1, reuse.least_gain
    try:
        engine.add_request(_REQUEST, prompt, SamplingParams(max_tokens=0))
        while engine.scheduler.is_live(_REQUEST):
            engine.step()
    finally:
        reuse.least_gain = usual
