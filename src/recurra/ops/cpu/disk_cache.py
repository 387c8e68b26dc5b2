"""Numba's disk cache, kept honest: machine code is loaded only if every source that went into it is unchanged.

Numba watches the one file that holds a kernel. Kernels inline helpers and freeze constants of other files;
with those changed under it (an update, an edit), it would run the old code without a word.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache, IndexDataCacheFile, NullCache

import recurra

log = logging.getLogger("recurra")

_ROOT = Path(recurra.__file__).parent


def fingerprint(file: Path, root: Path = _ROOT) -> str:
    """Digest of a kernel's file, of all files of the package that it imports, directly or not, and of the
    package's version.

    Args:
        file: a module of the package.
        root: the package's folder.
    """
    digest = hashlib.sha256(recurra.__version__.encode())
    for source in sorted(_closure(file.resolve(), root.resolve())):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _closure(file: Path, root: Path) -> set[Path]:
    found: set[Path] = set()
    left = [file]
    while left:
        source = left.pop()
        if source not in found:
            found.add(source)
            left.extend(_imports(source, root))
    return found


#: Imports by their look: parsing every file would take longer than loading the code does.
_FROM = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]*(\([^)]*\)|[^\n]*)", re.MULTILINE)
_PLAIN = re.compile(r"^[ \t]*import[ \t]+([^\n]*)", re.MULTILINE)


def _imports(source: Path, root: Path) -> Iterator[Path]:
    """Files of the package that ``source`` names in its imports."""
    text = source.read_text(encoding="utf-8")
    names = [name for line in _PLAIN.findall(text) for name in re.findall(r"[\w.]+", line)]
    for module, imported in _FROM.findall(text):
        names += [module, *(f"{module}.{name}" for name in re.findall(r"\w+", imported))]
    for name in names:
        package, *parts = name.split(".")
        if package == root.name and parts:
            base = root.joinpath(*parts)
            yield from (p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file())


@cache
def _fingerprint_now(file: str) -> str:
    """The fingerprint at the time of import: what the process runs."""
    return fingerprint(Path(file))


class KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, stamped with :func:`fingerprint`; a full disk costs time, not the answer.

    Args:
        function: the kernel.
        stamp: of its sources.

    Raises:
        RuntimeError: no folder to write to.
    """

    def __init__(self, function: Callable[..., Any], stamp: str) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(self.cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The compiled code, or None."""
        try:
            return super().load_overload(sig, target_context)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(
                f"compiled kernels in {self.cache_path} can't be read ({error}); they are compiled again"
            )
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep the compiled code, if that is possible."""
        try:
            super().save_overload(sig, data)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            _say_once(
                f"compiled kernels can't be kept in {self.cache_path} ({error}); every start compiles them"
            )


def kernel_cache(function: Callable[..., Any]) -> Any:
    """Where compiled code of a kernel is kept between processes; nowhere if nothing can be written."""
    try:
        return KernelCache(function, _fingerprint_now(function.__code__.co_filename))
    except RuntimeError:  # Numba found no folder
        _say_once(
            "neither the package's folder nor the user's cache folder can be written: every start compiles the "
            "CPU kernels anew. Set NUMBA_CACHE_DIR to a folder that can."
        )
        return NullCache()


@cache
def _say_once(message: str) -> None:
    log.warning(message)
