"""A folder's weight files: which there are, which tensors each holds, and reading one at a time.

safetensors files need no trust: they are a header and bytes. ``pytorch_model.bin`` is a pickle, a program;
it is read only when asked for, and then by torch's restricted loader, which builds tensors and nothing else.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from recurra.errors import CheckpointError
from recurra.models.config import Layout, read_json

INDEX = "model.safetensors.index.json"
PICKLE = "pytorch_model.bin"

#: Spellings of one tensor's name, made one: Mistral's prefix, and mamba_ssm's singular embedding.
_RENAMES = (
    (re.compile(r"^model\.(?=backbone\.|lm_head\.)"), ""),
    (re.compile(r"^backbone\.embedding\."), "backbone.embeddings."),
)

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<count>\d+)\.safetensors")


def canonical(name: str, renames: Iterable[tuple[str, str]] = ()) -> str:
    """A tensor's name as transformers spells it; ``renames`` are a family's own, (pattern, replacement)."""
    for pattern, replacement in _RENAMES:
        name = pattern.sub(replacement, name)
    for own, replacement in renames:
        name = re.sub(own, replacement, name)
    return name


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not read yet. ``dtype`` is torch's, or the file's name of a format unknown here."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    nbytes: int


class WeightFiles:
    """The tensors of a folder under their canonical names. Files are opened one at a time.

    Args:
        folder: for complaints.
        files: to read.
        renames: spellings of a family, (pattern, replacement).
        skips: patterns of names to leave out.

    Raises:
        CheckpointError: a file is damaged, missing from the shards, or two hold the same tensor.
    """

    def __init__(
        self,
        folder: Path,
        files: list[Path],
        renames: tuple[tuple[str, str], ...] = (),
        skips: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.files = files
        self.tensors: dict[str, Stored] = {}
        self._open: tuple[Path, Any] | None = None
        for file in files:
            for stored in self._header(file):
                if any(re.match(pattern, stored.name) for pattern in skips):
                    continue
                name = canonical(stored.name, renames)
                if name in self.tensors:
                    raise CheckpointError(f"{name} is in both {self.tensors[name].file} and {file}.")
                self.tensors[name] = stored

    def in_file_order(self, names: Iterable[str]) -> list[str]:
        """``names`` sorted so that each file is opened once."""
        return sorted(names, key=lambda name: self.files.index(self.tensors[name].file))

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, as stored."""
        return self.read_stored(self.tensors[name])

    def read_stored(self, stored: Stored) -> Tensor:
        """What the file holds."""
        opened = self._opened(stored.file)
        try:
            value: Tensor = (
                opened[stored.name] if isinstance(opened, dict) else opened.get_tensor(stored.name)
            )
        except (SafetensorError, OSError, RuntimeError) as error:
            raise damaged(stored.file, error) from error
        return value

    def close(self) -> None:
        """Let go of the file that is open."""
        self._open = None

    def _header(self, file: Path) -> Iterator[Stored]:
        opened = self._opened(file)
        if isinstance(opened, dict):
            for name, value in opened.items():
                yield Stored(file, name, tuple(value.shape), value.dtype, value.nbytes)
            return
        for name in opened.keys():  # noqa: SIM118 - a file, not a dict
            view = opened.get_slice(name)
            shape, dtype = tuple(view.get_shape()), _DTYPES.get(view.get_dtype(), view.get_dtype())
            yield Stored(file, name, shape, dtype, _nbytes(shape, dtype))

    def _opened(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = None  # the old one goes first, so that two are never mapped
            self._open = (file, _open_pickle(file) if file.suffix == ".bin" else _open_safetensors(file))
        return self._open[1]


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype | str) -> int:
    return torch.Size(shape).numel() * (dtype.itemsize if isinstance(dtype, torch.dtype) else 1)


def damaged(file: Path, error: Exception) -> CheckpointError:
    """The complaint about a file that can't be read."""
    size = file.stat().st_size if file.exists() else 0
    return CheckpointError(
        f"{file} ({size} bytes) is damaged or cut short: {error}. Download it again and compare its checksum."
    )


def _open_safetensors(file: Path) -> Any:
    with file.open("rb") as stream:
        if stream.read(24).startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"{file} is a Git LFS pointer, not the weights themselves; run `git lfs pull` in {file.parent}."
            )
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


def _open_pickle(file: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:
        raise CheckpointError(f"{file} holds more than tensors, or is damaged: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise CheckpointError(f"{file} doesn't hold a plain table of tensors.")
    return loaded


def find_safetensors(folder: Path, layout: Layout) -> list[Path]:
    """The files to read, in order.

    An index names them; without one all of the folder's are taken, Mistral's ``consolidated`` file only
    where nothing else is (folders often hold both forms of the same weights).

    Raises:
        CheckpointError: there are none, or some of the shards are missing.
    """
    index = folder / INDEX
    if index.is_file() and layout is not Layout.MISTRAL:
        return _indexed(index)
    found = sorted(folder.glob("*.safetensors"))
    consolidated = [file for file in found if file.name.startswith("consolidated")]
    others = [file for file in found if file not in consolidated]
    chosen = (consolidated or others) if layout is Layout.MISTRAL else (others or consolidated)
    if not chosen:
        raise CheckpointError(_nothing(folder))
    _all_shards(chosen)
    return chosen


def _indexed(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map.")
    files = [index.parent / str(name) for name in sorted(set(weight_map.values()))]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CheckpointError(f"{index} names files that are not in the folder: {', '.join(absent)}.")
    return files


def _all_shards(files: list[Path]) -> None:
    """Without an index, names such as model-00001-of-00003 say how many files there should be."""
    matches = [match for file in files if (match := _SHARD.match(file.name))]
    for match in matches:
        stem, count = match["stem"], int(match["count"])
        have = sum(other["stem"] == stem and int(other["count"]) == count for other in matches)
        if have != count:
            raise CheckpointError(
                f"{files[0].parent} holds {have} of the {count} files {stem}-*-of-{match['count']}.safetensors."
            )


def _nothing(folder: Path) -> str:
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt")) or list(folder.glob("*.pth")):
        return (
            f"{folder} holds weights only as a pickle ({PICKLE}), which can run any code while it is read."
            f" Convert it once with `python -m recurra.models.convert {folder} NEW_FOLDER`, or pass"
            ' load_format="pt"; both use the loader that builds tensors and nothing else.'
        )
    return f'{folder} holds no *.safetensors file (load_format="dummy" needs none).'


def find_pickle(folder: Path) -> list[Path]:
    """The pickled weights, for those who ask.

    Raises:
        CheckpointError: there are none.
    """
    found = sorted(folder.glob("pytorch_model*.bin"))
    if not found:
        raise CheckpointError(f'load_format="pt" reads {PICKLE}, and {folder} has none.')
    return found
