"""Compiled kernels on disk: fresh sources only, and a disk that can't be written stops nobody."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from recurra.ops.cpu import disk_cache
from recurra.ops.cpu.disk_cache import KernelCache, fingerprint, kernel_cache


def test_fingerprint_follows_imports_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "recurra"
    (root / "ops").mkdir(parents=True)
    files = {
        "kernel.py": "from recurra.ops import (\n    near,\n)\n",
        "ops/near.py": "def f():\n    from recurra.far import X\n",
        "far.py": "import numpy\nimport recurra.plain as plain\n",
        "plain.py": "",
        "other.py": "",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    before = fingerprint(root / "kernel.py", root)
    for name, changes in {"ops/near.py": True, "far.py": True, "plain.py": True, "other.py": False}.items():
        (root / name).write_text(files[name] + "# changed\n")
        assert (fingerprint(root / "kernel.py", root) != before) is changes, name
        (root / name).write_text(files[name])


def test_fingerprint_of_a_real_kernel_covers_the_helpers_that_it_inlines() -> None:
    root = Path(disk_cache.__file__).parents[2]
    names = {p.relative_to(root).as_posix() for p in disk_cache._closure(root / "ops/ssm/cpu_ssd.py", root)}
    assert {"ops/cpu/vectors.py", "ops/cpu/maths.py", "ops/cpu/jit.py"} <= names


def _double(x: int) -> int:
    return 2 * x


def test_code_compiled_from_other_sources_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def hits(stamp: str) -> int:
        compiled = numba.njit(_double)
        compiled._cache = KernelCache(_double, stamp)
        assert compiled(21) == 42
        return sum(compiled.stats.cache_hits.values())

    assert [hits(stamp) for stamp in ("old", "old", "new", "new")] == [0, 1, 0, 1]


def test_damaged_files_and_a_full_disk_cost_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    disk_cache._say_once.cache_clear()
    for _ in range(2):
        compiled = numba.njit(_double)
        compiled._cache = KernelCache(_double, "s")
        with caplog.at_level(logging.WARNING, "recurra"):
            assert compiled(4) == 8
        for file in tmp_path.rglob("*.nb?"):
            file.write_bytes(b"")
    assert "compiled again" in caplog.text


def test_nowhere_to_write_is_said_and_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nowhere(*_: object) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    disk_cache._say_once.cache_clear()
    monkeypatch.setattr(disk_cache, "KernelCache", nowhere)
    compiled = numba.njit(_double)
    with caplog.at_level(logging.WARNING, "recurra"):
        compiled._cache = kernel_cache(_double)
        compiled._cache = kernel_cache(_double)
    assert compiled(3) == 6
    assert caplog.text.count("NUMBA_CACHE_DIR") == 1


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="POSIX permissions")
def test_kernels_import_where_no_folder_can_be_written(tmp_path: Path) -> None:
    # /dev/null is no folder for anybody, root included.
    code = (
        "import numba.core.caching as c\n"
        "c.InTreeCacheLocator.from_function = classmethod(lambda *a: None)\n"
        "from recurra.ops.cpu.threads import _spins_per_us\n"
        "print(_spins_per_us() > 0)\n"
    )
    env = os.environ | {"HOME": "/dev/null", "XDG_CACHE_HOME": "/dev/null", "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout.strip() == "True", done.stderr
