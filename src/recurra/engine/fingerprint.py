"""What a saved state belongs to: one name for a model's weights and the layout of its states."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from recurra.cache.spec import AnySpec, StateSpec

_FORMAT = b"recurra-fingerprint-1"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
#: Places in a weights file that are looked at, and bytes at each: a model trained further differs there.
_PLACES, _SAMPLE = 64, 4096


def fingerprint(
    folder: Path,
    specs: tuple[AnySpec, ...],
    weight_dtype: torch.dtype,
    load_format: str,
    seed: int,
    page_size: int,
) -> str:
    """Changes with the configuration, the weights (their sizes, headers and samples), their precision, and the
    shapes and precisions of states."""
    digest = hashlib.sha256(_FORMAT)
    digest.update(f"{page_size}\n".encode())
    for spec in specs:
        if isinstance(spec, StateSpec):
            parts = [f"{t.name}{t.shape}{t.dtype}" for t in spec.tensors]
            digest.update(f"{spec.kind}:{';'.join(parts)}\n".encode())
        else:
            digest.update(f"{spec}\n".encode())
    digest.update(f"{weight_dtype} {load_format} {seed if load_format == 'dummy' else ''}\n".encode())
    config = folder / "config.json"
    digest.update(config.read_bytes() if config.is_file() else b"")
    for path in sorted(folder.iterdir()) if folder.is_dir() and load_format != "dummy" else ():
        if path.suffix in _WEIGHTS:
            _add_file(digest, path)
    return digest.hexdigest()


def _add_file(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name} {size}\n".encode())
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little") if path.suffix == ".safetensors" else 0
        digest.update(file.read(min(header, size)))
        for place in range(_PLACES):
            file.seek(max(0, size - _SAMPLE) * place // (_PLACES - 1))
            digest.update(file.read(_SAMPLE))
