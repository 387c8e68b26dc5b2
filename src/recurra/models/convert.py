"""Turn a pickled checkpoint into safetensors, once: ``python -m recurra.models.convert FOLDER NEW_FOLDER``.

The pickle is read by torch's restricted loader, which builds tensors and runs nothing else. Names and values
stay as they are, so the new folder has the old one's layout.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from safetensors.torch import save_file

from recurra.errors import CheckpointError, RecurraError
from recurra.models.files import WeightFiles, find_pickle

#: Everything small beside the weights: configuration, tokenizer, chat template, licence.
_COMPANIONS = ("*.json", "*.txt", "*.model*", "*.jinja", "*.md", "LICENSE*")


def convert(source: Path, target: Path) -> list[Path]:
    """Write each pickle of ``source`` as a safetensors file into ``target``, with the files beside it.

    Returns:
        the files written.

    Raises:
        CheckpointError: no pickle, one that holds more than tensors, or ``target`` has weights already.
    """
    if list(target.glob("*.safetensors")):
        raise CheckpointError(f"{target} holds safetensors files already; give an empty folder.")
    written = []
    for pickle in find_pickle(source):
        files = WeightFiles(source, [pickle])
        target.mkdir(parents=True, exist_ok=True)
        out = target / f"{pickle.stem.replace('pytorch_model', 'model')}.safetensors"
        # Tied tables share memory in the pickle, which the format doesn't know: each name gets its own.
        tensors = {
            stored.name: files.read(name).clone().contiguous() for name, stored in files.tensors.items()
        }
        save_file(tensors, out, metadata={"format": "pt"})
        files.close()
        written.append(out)
    for pattern in _COMPANIONS:
        for file in source.glob(pattern):
            if not file.name.endswith(".index.json"):
                shutil.copy(file, target)
    return written


def main(arguments: list[str]) -> int:
    """The command line; 0 when it worked."""
    parser = argparse.ArgumentParser(prog="python -m recurra.models.convert", description=__doc__)
    parser.add_argument("source", type=Path, help="folder with pytorch_model.bin")
    parser.add_argument("target", type=Path, help="folder to write")
    given = parser.parse_args(arguments)
    try:
        written = convert(given.source, given.target)
    except RecurraError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for file in written:
        print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
