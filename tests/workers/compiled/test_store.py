"""Compiled entries: whole or absent, checked before use, and only this user's."""

import json
import logging
import threading
from pathlib import Path

import pytest

from workers.cache_folder import CacheFolderError, cache_folder
from workers.compiled import store
from workers.compiled.recipe import recipe

KEY = "k" * 32


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "slipstream" / "compiled"


def add(key: str = KEY, content: bytes = b"code") -> None:
    folder = store.begin()
    (folder / "one.so").write_bytes(content)
    store.publish(folder, key)


def test_an_entry_is_found_once_it_is_published(root: Path) -> None:
    folder = store.begin()
    (folder / "one.so").write_bytes(b"code")
    assert store.find(KEY) is None
    store.publish(folder, KEY)
    assert store.find(KEY) == root / KEY
    assert root.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["changed", "missing", "no manifest", "manifest of another kind"])
def test_a_damaged_entry_is_removed(damage: str, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    add()
    library, manifest = root / KEY / "one.so", root / KEY / store.MANIFEST
    if damage == "changed":
        library.write_bytes(b"evil")
    elif damage == "missing":
        library.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(json.dumps([1]))
    with caplog.at_level(logging.WARNING):
        assert store.find(KEY) is None
    assert [record.message.count("compiled again") for record in caplog.records] == [1]
    assert not (root / KEY).exists()
    add()
    assert store.find(KEY) is not None


def test_the_first_of_several_writers_wins(root: Path) -> None:
    writers = [threading.Thread(target=add, args=(KEY, bytes([i]) * 1000)) for i in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert store.find(KEY) is not None
    assert [path.name for path in root.iterdir()] == [KEY]


def test_a_folder_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getuid", lambda: 12345)
    with pytest.raises(CacheFolderError, match="belongs to another user"):
        cache_folder("compiled")
    assert store.find(KEY) is None


def test_costs_are_read_back() -> None:
    assert store.read_costs(KEY) is None
    store.write_costs(KEY, [{1: 0.5}, {}])
    assert store.read_costs(KEY) == [{"1": 0.5}, {}]


def test_the_key_depends_on_every_byte_of_the_weights(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\0" * 100)
    first = recipe([tmp_path], "bf16")
    assert first == recipe([tmp_path], "bf16") != recipe([tmp_path], "fp32")
    weights.write_bytes(b"\0" * 99 + b"\1")
    assert recipe([tmp_path], "bf16") != first


def test_the_key_depends_on_the_version_of_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upgrade leaves the name of the command as it was."""
    monkeypatch.setenv("PATH", str(tmp_path))
    versions = [tmp_path / name for name in ("g++-12", "g++-13")]
    for version in versions:
        version.write_text(version.name)
        version.chmod(0o755)
    command = tmp_path / "g++"
    command.symlink_to(versions[0])
    first = recipe([], "bf16")
    command.unlink()
    assert recipe([], "bf16") != first
    command.symlink_to(versions[1])
    second = recipe([], "bf16")
    versions[1].write_text("of a later release")
    assert len({first, second, recipe([], "bf16")}) == 3
