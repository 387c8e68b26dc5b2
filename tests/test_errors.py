"""A package that is missing is named with the way to get it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from recurra.errors import MissingDependencyError, missing_dependency

MODEL = Path(__file__).parents[1] / "models" / "recurra-tiny"


@pytest.mark.parametrize(
    ("module", "way"),
    [
        ("fastapi.routing", "pip install 'recurra[serve]'"),
        ("zmq", "pip install 'recurra[serve]'"),
        ("jinja2", "pip install recurra mends it"),
        ("tokenizers", "pip install recurra mends it"),
    ],
)
def test_the_way_to_get_a_package(module: str, way: str) -> None:
    error = missing_dependency(
        ModuleNotFoundError(f"No module named {module!r}", name=module), "recurra serve"
    )
    assert isinstance(error, MissingDependencyError)
    assert f"recurra serve needs the package {module.partition('.')[0]!r}" in str(error)
    assert way in str(error)


@pytest.mark.parametrize("module", ["recurra.nonsense", "recurra", None])
def test_a_missing_module_of_our_own_is_a_bug_and_stays_one(module: str | None) -> None:
    error = ModuleNotFoundError("gone", name=module)
    assert missing_dependency(error, "recurra serve") is error


_WITHOUT = """
import sys
from recurra.cli import main

class Without:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Without())
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    ("package", "command", "way"),
    [
        ("jinja2", "serve", "pip install recurra mends it"),
        ("fastapi", "serve", "pip install 'recurra[serve]'"),
        ("jinja2", "complete", "pip install recurra mends it"),
    ],
)
def test_the_command_says_it_in_a_line(package: str, command: str, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, package, command, str(MODEL)],
        capture_output=True, text=True, check=False, timeout=30, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"needs the package '{package}'" in done.stderr
    assert way in done.stderr
    assert "internal error" not in done.stderr
