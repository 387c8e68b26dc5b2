"""Saved states: a file is believed only whole, tiers keep their budgets, and a restart finds what was kept."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from recurra.cache.disk import DiskStore
from recurra.cache.prefix import Entry, PrefixTree, pack
from recurra.cache.snapshots import SnapshotPool
from recurra.cache.state_file import SavedState, read_state, write_state
from recurra.cache.store import Budgets, Tiers
from recurra.errors import ConfigError, StateError

ROW = 512
CPU = torch.device("cpu")


def _row(n: int) -> Tensor:
    return torch.full((ROW,), n, dtype=torch.uint8)


def _state(n: int = 3, tokens: tuple[int, ...] = (5, 6, 7, 8)) -> SavedState:
    return SavedState("model", tokens, 3, _row(n), (torch.arange(6.0).view(1, 2, 1, 3),))


# ---- one file ----


def test_a_state_comes_back_from_its_file_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert write_state(path, _state()) == path.stat().st_size
    found = read_state(path, "model", ROW)
    assert (found.fingerprint, found.tokens, found.position) == ("model", (5, 6, 7, 8), 3)
    assert torch.equal(found.row, _row(3))
    assert torch.equal(found.pages[0], _state().pages[0])
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    with safe_open(path, "pt") as others:
        assert torch.equal(others.get_tensor("state"), _row(3))


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_state(path, _state())
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises(StateError, match=r"a\.safetensors"):
            read_state(path, "model", ROW)
    for length in (0, 1, 8, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(StateError, match=r"a\.safetensors"):
            read_state(path, "model", ROW)
    path.write_bytes(whole + b"x")
    with pytest.raises(StateError, match="belong to nothing"):
        read_state(path, "model", ROW)


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_state(path, _state())
    with pytest.raises(StateError, match="another model"):
        read_state(path, "other", ROW)
    with pytest.raises(StateError, match="512 bytes, the model's have 513"):
        read_state(path, "model", ROW + 1)
    with pytest.raises(StateError, match="can't be read"):
        read_state(tmp_path / "nothing", "model", ROW)


# ---- a folder ----


def test_a_folder_has_one_owner_and_forgets_what_is_half_there(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, "model", ROW)
    with pytest.raises(ConfigError, match="another process"):
        DiskStore(tmp_path, "model", ROW)
    kept, lost, unlisted = (disk.write("s", _state(n, (n, n, n, n))) for n in (1, 2, 3))
    disk._index.execute("DELETE FROM states WHERE name = ?", (unlisted.name,))
    disk._index.commit()
    disk._path(lost.name).unlink()
    (disk.folder / ".x.1.tmp").write_bytes(b"half")
    disk.close()
    again = DiskStore(tmp_path, "model", ROW)
    assert list(again.lines()) == [kept]
    assert sorted(p.stem for p in again.folder.glob("*.safetensors")) == [kept.name]
    assert not list(again.folder.glob(".*.tmp"))
    assert torch.equal(again.read(kept.name, kept.packed).row, _row(1))
    with pytest.raises(StateError, match="another text"):
        again.read(kept.name, pack([9, 9, 9]))
    again.remove(kept.name)
    assert not list(again.lines())
    again.close()


def test_a_damaged_index_is_begun_anew(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, "model", ROW)
    disk.write("s", _state())
    disk.close()
    for path in disk.folder.glob("index.sqlite*"):
        path.write_bytes(b"no database at all" * 100)
    again = DiskStore(tmp_path, "model", ROW)
    assert not list(again.lines())
    again.close()


# ---- tiers ----


def _tiers(rows: int, host: int = 0, disk: DiskStore | None = None, disk_bytes: int = 0) -> Tiers:
    pool = SnapshotPool(ROW, rows, CPU)
    return Tiers(PrefixTree(), pool, "model", Budgets(host, disk_bytes), disk)


def _keep(tiers: Tiers, n: int, length: int = 20) -> Entry:
    entry = tiers.tree.insert("s", pack([n] * length), length)
    assert tiers.keep(entry, _row(n))
    tiers.check()
    return entry


def _held(tiers: Tiers, entry: Entry) -> Tensor:
    found = tiers.fetch(entry)
    assert found is not None
    tiers.check()
    return found[0]


def test_rows_alone_give_up_what_is_worth_least() -> None:
    tiers = _tiers(rows=2)
    long, short = _keep(tiers, 1, 100), _keep(tiers, 2, 10)
    third = _keep(tiers, 3, 20)
    assert (long.live, short.live, third.live) == (True, False, True)
    assert torch.equal(_held(tiers, long), _row(1))
    assert tiers.given_up == 1
    tiers.drop(long, "evicted")
    tiers.drop(third, "evicted")
    assert tiers.rows.num_free == 2


def test_no_row_at_all_keeps_nothing() -> None:
    tiers = _tiers(rows=0)
    entry = tiers.tree.insert("s", pack([1, 2]), 2)
    assert not tiers.keep(entry, _row(1))
    assert tiers.tree.num_entries == 0


def test_what_leaves_the_device_is_found_below_within_its_budget(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, "model", ROW)
    tiers = _tiers(rows=1, host=2 * ROW, disk=disk, disk_bytes=1 << 20)
    entries = []
    for n in range(1, 6):
        entries.append(_keep(tiers, n))
        tiers.flush()
        assert tiers.host_bytes <= 2 * ROW
    assert all(entry.live for entry in entries)
    for n, entry in enumerate(entries, 1):
        assert torch.equal(_held(tiers, entry), _row(n))
        saved = tiers.saved(entry)
        assert saved is not None
        assert saved.tokens == (n,) * 20
    tiers.close()


def test_the_disk_keeps_its_budget_and_its_folder_clean(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, "model", ROW)
    size = disk.write("s", SavedState("model", (1,) * 20, 20, _row(1))).nbytes
    tiers = _tiers(rows=1, disk=disk, disk_bytes=3 * size)
    for n in range(1, 9):
        _keep(tiers, n)
        tiers.flush()
        assert tiers.disk_bytes <= 3 * size
    tiers.flush()
    assert len(list(disk.folder.glob("*.safetensors"))) == 3
    tiers.close()


def test_a_restart_finds_what_was_kept_and_leaves_damage_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = _tiers(rows=4, disk=DiskStore(tmp_path, "model", ROW), disk_bytes=1 << 20)
    for n in (1, 2):
        _keep(tiers, n)
    tiers.close()
    disk = DiskStore(tmp_path, "model", ROW)
    path = disk._path(disk.name_of("s", pack([2] * 20)))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    again = _tiers(rows=4, disk=disk, disk_bytes=1 << 20)
    good = again.tree.lookup("s", pack([1] * 25), 25).entry
    bad = again.tree.lookup("s", pack([2] * 25), 25).entry
    assert good is not None
    assert bad is not None
    assert torch.equal(_held(again, good), _row(1))
    assert again.fetch(bad) is None
    assert "checksum is wrong" in caplog.text
    assert not bad.live
    assert again.damaged == 1
    again.close()


def test_a_disk_that_fails_loses_the_copy_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    disk = DiskStore(tmp_path, "model", ROW)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "write", full)
    tiers = _tiers(rows=2, disk=disk, disk_bytes=1 << 20)
    entry = _keep(tiers, 1)
    tiers.flush()
    assert "No space left" in caplog.text
    assert entry.pins == 0
    assert torch.equal(_held(tiers, entry), _row(1))
    tiers.close()


def test_random_keeping_and_fetching_never_gives_a_foreign_state(tmp_path: Path) -> None:
    draw = random.Random(0)
    disk = DiskStore(tmp_path, "model", ROW)
    tiers = _tiers(rows=3, host=3 * ROW, disk=disk, disk_bytes=12_000)
    for step in range(400):
        n, length = draw.randrange(1, 12), draw.choice((4, 9, 30))
        match = tiers.tree.lookup("s", pack([n] * 40), length)
        if match.entry is not None and draw.random() < 0.5:
            match.entry.hits += 1
            found = tiers.fetch(match.entry)
            assert found is not None
            tiers.use(match.entry)
            assert torch.equal(found[0], _row(n * match.entry.position % 256)), step
        else:
            entry = tiers.tree.insert("s", pack([n] * length), length)
            tiers.keep(entry, _row(n * length % 256))
        if step % 10 == 0:
            tiers.flush()
        tiers.tree.check()
        tiers.check()
    tiers.close()


# ---- the process dies ----

_WRITER = """
import itertools, sys, torch
from pathlib import Path
from recurra.cache.disk import DiskStore
from recurra.cache.prefix import PrefixTree, pack
from recurra.cache.snapshots import SnapshotPool
from recurra.cache.store import Budgets, Tiers

size = int(sys.argv[2])
tiers = Tiers(PrefixTree(), SnapshotPool(size, 3, torch.device("cpu")), "model", Budgets(0, 8 * size),
              DiskStore(Path(sys.argv[1]), "model", size))
print("ready", flush=True)
for n in itertools.count(int(sys.argv[3])):
    entry = tiers.tree.insert("s", pack([n] * 9), 9)
    tiers.keep(entry, torch.full((size,), n % 251, dtype=torch.uint8))
"""


def kill_and_look(folder: Path, rounds: int, row: int, wait: Callable[[], float]) -> int:
    """Kill a writing process again and again; returns how many states were found whole in all."""
    whole = 0
    for number in range(rounds):
        command = [
            sys.executable,
            "-c",
            textwrap.dedent(_WRITER),
            str(folder),
            str(row),
            str(number * 100_000),
        ]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(wait())
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        disk = DiskStore(folder, "model", row)
        for line in disk.lines():
            token = int.from_bytes(line.packed[:4], "little")
            state = disk.read(line.name, line.packed)  # the names are right, so must the contents be
            assert state.row.shape == (row,)
            assert bool((state.row == token % 251).all())
            whole += 1
        disk.close()
    return whole


def test_a_killed_writer_leaves_only_whole_states(tmp_path: Path) -> None:
    draw = random.Random(1)
    assert kill_and_look(tmp_path, 2, 200_000, lambda: draw.uniform(0.05, 0.1)) > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_fifty_killed_writers_leave_only_whole_states(tmp_path: Path) -> None:
    draw = random.Random(2)
    assert kill_and_look(tmp_path, 50, 1_000_000, lambda: draw.uniform(0.0, 0.2)) > 50
