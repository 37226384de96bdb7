"""Files that are to be written are checked before anything is computed for them."""

import os
from pathlib import Path

import pytest

from cluster.files import check_outputs
from protos.errors import ConfigError
from tests.cluster.cli.conftest import run


def test_files_that_can_be_written_pass(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("old")
    check_outputs([None, there, tmp_path / "new.json", Path("/dev/null"), Path("/dev/null")], [None, tmp_path / "in"])
    assert there.read_text() == "old"
    assert not (tmp_path / "new.json").exists()


def test_what_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*gone to write x to"):
        check_outputs([tmp_path / "gone" / "x"])
    with pytest.raises(ConfigError, match="cannot be written: it is a folder"):
        check_outputs([tmp_path])
    with pytest.raises(ConfigError, match="cannot be written: file name too long"):
        check_outputs([tmp_path / ("x" * 1000)])
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="cannot be written: permission denied"):
        check_outputs([tmp_path / "x"])


@pytest.mark.parametrize("name", ["/proc/x.json", "/proc/version"])
def test_what_not_even_root_can_write_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot be written: "):
        check_outputs([Path(name)])


def test_a_link_to_a_file_that_is_not_there_remains(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "new")
    check_outputs([link])
    assert link.is_symlink()
    assert not link.exists()


def test_an_input_is_not_written_under_any_of_its_names(tmp_path: Path) -> None:
    read, link = tmp_path / "in.jsonl", tmp_path / "link"
    read.write_text("{}")
    link.symlink_to(read)
    for name in (read, link, tmp_path / "." / "in.jsonl"):
        with pytest.raises(ConfigError, match="it is read, too; name another file"):
            check_outputs([name], [read])


@pytest.mark.parametrize("option", ["--output", "--log"])
def test_generate_does_not_write_to_its_prompts(tmp_path: Path, option: str) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('"a"\n')
    with pytest.raises(ConfigError, match="it is read, too"):
        run("generate", "--prompts", str(prompts), option, str(prompts), "--model", "none")


@pytest.mark.parametrize(
    "command",
    [
        "check --prompts {0} --json {0}",
        "build-datastore {0} --output {0}",
        "build-datastore {0.parent} --output {0}",
    ],
)
def test_other_commands_do_not_write_to_what_they_read(tmp_path: Path, command: str) -> None:
    read = tmp_path / "in.txt"
    read.write_text("a\n")
    with pytest.raises(ConfigError, match="it is read, too"):
        run(*command.format(read).split())
