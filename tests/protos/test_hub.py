"""Names of models: what is a folder and what a Hub id, and a Hub that cannot be reached."""

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from huggingface_hub import close_session, constants

from cluster.cli import main as cli
from cluster.settings import engine_config, remote_engine_config
from proposers.formats.detect import describe
from protos import hub
from protos.config.engine import ModelConfig
from protos.config.method import UNKNOWN
from protos.errors import ModelError, SlipstreamError
from protos.hub import folder_of
from runtime.text.sampling_defaults import sampling_defaults
from runtime.text.tokenizer import load_tokenizer
from tests.conftest import ModelPair
from workers.weights.hub import fetch, read_config

NAME = "nobody/nothing-at-all"


@pytest.mark.parametrize(
    "name", ["./nosuch", "../nosuch", "/no/such", "~/no such", "~nosuchuser/x", "a/b/c", ".", "sub/nosuch"]
)
def test_what_looks_like_a_path_is_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path)
    if name == ".":
        assert folder_of(name) == Path()
    else:
        with pytest.raises(ModelError, match=f"^no such folder: {name}"):
            folder_of(name)


@pytest.mark.parametrize("name", ["gpt2", NAME, "not a valid id"])
def test_other_names_are_hub_ids(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert folder_of(name) is None


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"^not a folder: .*model\.safetensors$"):
        folder_of(str(tmp_path / "model.safetensors"))


# Commands, and what loads


@pytest.mark.parametrize(
    "given",
    [
        ["serve", "./nosuch"],
        ["check", "./nosuch"],
        ["generate", "x", "--model", "./nosuch"],
        ["generate", "x", "--tokenizer", "./nosuch"],
        ["generate", "x", "--speculative-config", '{"model": "./nosuch", "num_speculative_tokens": 2}'],
        ["generate", "x", "--speculative-config", '{"model": "./nosuch"}'],
        ["env", "--model", "./nosuch"],
        ["build-datastore", __file__, "--output", "/dev/null", "--model", "./nosuch"],
    ],
    ids=lambda given: " ".join(given)[:60],
)
def test_every_command_refuses_a_folder_that_does_not_exist(given: list[str]) -> None:
    with pytest.raises(ModelError, match=r"^no such folder: \./nosuch$"):
        cli.app(given, standalone_mode=False)


def test_a_replica_elsewhere_may_have_the_folder() -> None:
    given = {"model": "/on/another/machine", "device": "cpu"}
    assert remote_engine_config(given).model.model == "/on/another/machine"
    with pytest.raises(ModelError, match="no such folder"):
        engine_config(given)


def test_a_folder_is_the_same_one_for_workers_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_pair: ModelPair
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").symlink_to(demo_pair.target)
    (tmp_path / "draft").symlink_to(demo_pair.draft)
    (tmp_path / "texts").touch()
    speculative = {
        "method": ["rest", "draft_model"],
        "model": "./draft",
        "datastore": "texts",
        "num_speculative_tokens": 2,
    }
    for read in (engine_config, remote_engine_config):
        config = read({"model": "target", "tokenizer": "./target", "speculative_config": speculative})
        assert config.speculative is not None
        named = (config.model.model, config.model.tokenizer, config.speculative.model, config.speculative.datastore)
        assert named == tuple(str(tmp_path / name) for name in ("target", "target", "draft", "texts"))


def test_a_folder_that_another_machine_lacks_is_reported_with_that_machine(tmp_path: Path) -> None:
    lacking = tmp_path / "nothing"
    with pytest.raises(ModelError, match=f"^no such folder: {lacking}, on the machine {socket.gethostname()}$"):
        folder_of(str(lacking))


# Without the Hub


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The client as it is without HF_HUB_OFFLINE, which the tests set."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.5)
    monkeypatch.setenv("NO_PROXY", "*")
    hub._unreachable.cache_clear()
    close_session()
    yield monkeypatch
    hub._unreachable.cache_clear()
    close_session()


def refused() -> str:
    """Return the URL of a port that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def assert_one_line(cause: str) -> None:
    """Check what each reader of the Hub does when the Hub cannot be reached."""
    config = ModelConfig(NAME)
    assert describe(NAME) == UNKNOWN
    assert sampling_defaults(config) == {}
    for load in (load_tokenizer, read_config, fetch):
        with pytest.raises(
            SlipstreamError, match=rf"^{NAME}: .*the cache, and the Hub cannot be reached \({cause}.*\)$"
        ) as caught:
            load(config)
        assert "\n" not in str(caught.value)


def test_a_refused_connection(online: pytest.MonkeyPatch) -> None:
    online.setattr(constants, "ENDPOINT", refused())
    assert_one_line("ConnectError: .*Connection refused")


def test_a_name_that_is_not_found(online: pytest.MonkeyPatch) -> None:
    online.setattr(constants, "ENDPOINT", "http://no-such-host.invalid")
    assert_one_line("ConnectError: ")


def test_a_hub_that_does_not_answer(online: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        online.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert_one_line("ReadTimeout: ")


def test_a_proxy_that_is_not_there(online: pytest.MonkeyPatch) -> None:
    online.delenv("NO_PROXY")
    online.setenv("HTTPS_PROXY", refused())
    online.setattr(constants, "ENDPOINT", "https://hub.invalid")
    assert_one_line("ConnectError: ")


def test_offline_mode(online: pytest.MonkeyPatch) -> None:
    online.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_one_line("HF_HUB_OFFLINE is set")


def test_a_connection_that_breaks_later(online: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> str:
        raise httpx2.ReadError("gone")

    online.setattr("workers.weights.hub.unreachable", lambda: None)
    online.setattr("workers.weights.hub.snapshot_download", broken)
    with pytest.raises(ModelError, match=f"^{NAME}: cannot be fetched from the Hub: ReadError: gone$"):
        read_config(ModelConfig(NAME))
