"""One saved state as a safetensors file: written whole or not at all, and believed only if it checks out.

The file holds ``tokens`` (int32), ``state`` (a slot's bytes, uint8) and, for models with attention,
``pages.0``, ``pages.1`` ... (keys and values). Its metadata names the format, the model's fingerprint,
how many of the tokens the state has seen, and a checksum of everything.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save_file
from torch import Tensor

from recurra.errors import StateError

FORMAT = "recurra-state-1"
SUFFIX = ".safetensors"

_DTYPES = {
    "U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "F32": torch.float32, "F16": torch.float16,
    "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
}  # fmt: skip
_MOST_HEADER = 1 << 20
#: Bytes read at a time.
_PIECE = 4 << 20


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state apart from any engine. Its tensors are never written again.

    Attributes:
        fingerprint: of the model, and of how it lays out its states.
        tokens: the text so far; a part at the end may not be computed yet.
        position: how many of the tokens the state has seen.
        row: a slot, (bytes,) uint8 in the host's memory.
        pages: keys and values up to ``position``: for each layer's keys, then values, (pages, page size,
            heads, dim). Empty in a model without attention.
    """

    fingerprint: str
    tokens: tuple[int, ...]
    position: int
    row: Tensor
    pages: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.row.nbytes + sum(page.nbytes for page in self.pages)


def write_state(path: Path, state: SavedState, sync: bool = True) -> int:
    """Write a state under its name in one go: a reader sees the old file, the new one, or none.

    Args:
        sync: have it on the disk, not only in the system's memory, before it gets its name.

    Returns:
        the file's bytes.
    """
    tensors = _tensors(state)
    metadata = {
        "format": FORMAT,
        "fingerprint": state.fingerprint,
        "position": str(state.position),
        "crc32": str(_checksum(tensors, state.fingerprint, state.position)),
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, draft, metadata)
        if sync:
            _sync(draft)
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    return path.stat().st_size


def read_state(path: Path, fingerprint: str | None = None, row_bytes: int | None = None) -> SavedState:
    """Read a state and check all of it.

    Args:
        fingerprint: what the file must name; None: anything.
        row_bytes: bytes that a slot must have; None: any number.

    Raises:
        StateError: it is damaged, or of another model; the message names the file.
    """
    try:
        with path.open("rb") as file:
            return _read(file, fingerprint, row_bytes)
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError) as error:
        raise StateError(
            f"{path}: can't be read as a saved state ({type(error).__name__}: {error})"
        ) from None


def _read(file: BinaryIO, fingerprint: str | None, row_bytes: int | None) -> SavedState:
    header, start, size = _header(file)
    metadata = header.pop("__metadata__", {})
    _expect(metadata.get("format") == FORMAT, "it is no saved state of this version")
    found, position = str(metadata["fingerprint"]), int(metadata["position"])
    _expect(
        fingerprint is None or found == fingerprint,
        "it was saved with another model, or with states of another layout or precision",
    )
    tensors, crc = _read_tensors(file, header, start, size, _seed(found, position))
    _expect(str(crc) == metadata["crc32"], "its checksum is wrong: the file is damaged")
    return _state(tensors, found, position, row_bytes)


def _tensors(state: SavedState) -> dict[str, Tensor]:
    pages = {f"pages.{n}": page.cpu().contiguous() for n, page in enumerate(state.pages)}
    tokens = torch.tensor(state.tokens, dtype=torch.int32)
    return {"tokens": tokens, "state": state.row.cpu().contiguous(), **pages}


def _state(tensors: dict[str, Tensor], fingerprint: str, position: int, row_bytes: int | None) -> SavedState:
    row, tokens = tensors["state"], tensors["tokens"]
    if row.dtype is not torch.uint8 or row.dim() != 1 or tokens.dtype is not torch.int32:
        raise StateError("its tensors are of other types than a saved state's")
    if row_bytes is not None and row.shape[0] != row_bytes:
        raise StateError(f"its state has {row.shape[0]} bytes, the model's have {row_bytes}")
    if not 0 < position <= tokens.shape[0]:
        raise StateError(f"its position {position} is not within its {tokens.shape[0]} tokens")
    pages = tuple(tensors[f"pages.{n}"] for n in range(len(tensors) - 2))
    return SavedState(fingerprint, tuple(tokens.tolist()), position, row, pages)


def _header(file: BinaryIO) -> tuple[dict[str, Any], int, int]:
    """The header, where the data starts, and how many bytes it must have."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or not 2 <= length <= min(_MOST_HEADER, size - 8):
        raise StateError("it is cut off, or no safetensors file")
    header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise StateError("its header is no table")
    return header, 8 + length, size - 8 - length


def _read_tensors(
    file: BinaryIO, header: dict[str, Any], start: int, size: int, seed: int
) -> tuple[dict[str, Tensor], int]:
    """The tensors and their checksum, which a thread sums while the next piece is read."""
    tensors, total, crc = {}, 0, seed
    with ThreadPoolExecutor(1) as summing:
        pending: Future[int] | None = None
        for name in sorted(header):
            tensor, first = _allocate(name, header[name], size)
            file.seek(start + first)
            pending = summing.submit(_extend, pending, crc, _title(name, tensor))
            for piece in _pieces(file, _bytes(tensor)):
                pending = summing.submit(_extend, pending, crc, piece)
            tensors[name] = tensor
            total += tensor.nbytes
        if total != size:
            raise StateError("it is cut off, or has bytes that belong to nothing")
        return tensors, crc if pending is None else pending.result()


def _allocate(name: str, entry: dict[str, Any], size: int) -> tuple[Tensor, int]:
    """Memory for a tensor, and where its data begins."""
    shape = [int(n) for n in entry["shape"]]
    first, last = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    if (
        min(shape, default=0) < 0
        or math.prod(shape) * dtype.itemsize != last - first
        or not 0 <= first <= last <= size
    ):
        raise StateError(f"its tensor {name!r} has another size than it says")
    return torch.empty(shape, dtype=dtype), first


def _pieces(file: BinaryIO, view: memoryview) -> Iterator[memoryview]:
    """Fill memory from a file, a piece at a time."""
    at = 0
    while at < len(view):
        count = file.readinto(view[at : at + _PIECE])  # type: ignore[attr-defined]
        if not count:
            raise StateError("it is cut off")
        yield view[at : at + count]
        at += count


def _extend(before: Future[int] | None, seed: int, piece: bytes | memoryview) -> int:
    return zlib.crc32(piece, seed if before is None else before.result())


def _bytes(tensor: Tensor) -> memoryview:
    content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(content)


def _title(name: str, tensor: Tensor) -> bytes:
    return f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()


def _seed(fingerprint: str, position: int) -> int:
    return zlib.crc32(f"{fingerprint} {position}".encode())


def _checksum(tensors: dict[str, Tensor], fingerprint: str, position: int) -> int:
    """Of everything that the file says: names, types, shapes and contents, in the order of names."""
    crc = _seed(fingerprint, position)
    for name in sorted(tensors):
        crc = zlib.crc32(_title(name, tensors[name]), crc)
        crc = zlib.crc32(_bytes(tensors[name]), crc)
    return crc


def _expect(ok: bool, problem: str) -> None:
    if not ok:
        raise StateError(problem)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
