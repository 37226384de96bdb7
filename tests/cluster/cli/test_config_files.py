"""The YAML file of `--config`."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.cli import main
from cluster.cli.options import SERVE_ONLY, engine_options, safety_options, server_options
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from tests.cluster.cli.conftest import run


def test_a_yaml_file_has_the_same_names_and_flags_win(tmp_path: Path, served: list[tuple[EngineConfig, Any]]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "model: m\nmax-model-len: 64\nmax_num_seqs: 3\nport: 9\ntp: 1\nenable_prefix_caching: false\n"
        "served_model_name: [a, b]\nspeculative_config:\n  method: ngram\n  num_speculative_tokens: 4\n"
    )
    run("serve", "--config", str(path), "--max-num-seqs", "5")
    ((config, options),) = served
    assert (config.model.model, config.model.max_model_len, config.scheduler.max_num_seqs) == ("m", 64, 5)
    assert (options.http.port, config.cache.enable_prefix_caching) == (9, False)
    assert config.served_model_name == ("a", "b")
    assert config.speculative is not None
    assert (config.speculative.method, config.speculative.num_speculative_tokens) == ("ngram", 4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_modl_len: 3", "unknown option 'max_modl_len', did you mean 'max_model_len'"),
        ("- a", "must hold options"),
        ("host: [1]", r"config.yaml: host must be a single value, got \[1\]"),
        ("host: {a: 1}", "config.yaml: host must be a single value, got {'a': 1}"),
        ("? [a]\n: 1", "is not YAML: found unhashable key"),
        (
            "max_num_seqs: 4\nport: 9\nmax_num_seqs: 5",
            "line 3 of .*config.yaml is not YAML: max_num_seqs is given twice",
        ),
        ("speculative_config: {method: ngram, method: suffix}", "method is given twice"),
        ("max-num-seqs: 4\nmax_num_seqs: 5", "max_num_seqs is given twice, as max-num-seqs and as max_num_seqs"),
        ("tp: 1\ntensor_parallel_size: 2", "tensor_parallel_size is given twice, as tp and as tensor_parallel_size"),
        ("a: 1\nb: [\n", "line 3 of .*config.yaml is not YAML: expected the node content"),
    ],
)
def test_bad_yaml(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        run("serve", "--config", str(path))


def test_options_that_may_be_repeated_may_be_single(tmp_path: Path, served: list[tuple[EngineConfig, Any]]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: m\nserved_model_name: a\napi_key: secret\nallowed_origins: https://a.example\n")
    run("serve", "--config", str(path))
    ((config, options),) = served
    assert config.served_model_name == ("a",)
    assert (options.safety.api_key, options.safety.allowed_origins) == (("secret",), ("https://a.example",))


def test_null_is_the_default(tmp_path: Path, served: list[tuple[EngineConfig, Any]]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: m\nserved_model_name: null\napi_key: null\nallowed_origins: null\nport: null\n")
    run("serve", "--config", str(path))
    ((config, options),) = served
    assert (config.served_model_name, options.safety.api_key, options.http.port) == ((), (), 8000)


def test_options_of_a_server_are_known_to_all_commands() -> None:
    own = {name for name in inspect.signature(main.serve).parameters if name not in ("config", "positional_model")}
    tables = {option.name for option in (*engine_options(), *server_options(), *safety_options())}
    assert own - tables == SERVE_ONLY


def test_other_commands_take_a_servers_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("port: 9\napi_key: [a]\nmax_waiting_requests: 5\nmax_num_seqs: 7\n")
    run("env", "--config", str(path))
    assert '"max_num_seqs":7' in capsys.readouterr().out
    path.write_text("prt: 9\n")
    with pytest.raises(ConfigError, match="unknown option 'prt'"):
        run("env", "--config", str(path))


def test_hidden_options_are_not_suggested(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("max_waiting_request: 5\n")
    with pytest.raises(ConfigError, match="unknown option 'max_waiting_request'") as caught:
        run("env", "--config", str(path))
    assert "max_running_requests" not in str(caught.value)


def test_errors_name_the_value_and_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("port: 99999\n")
    with pytest.raises(typer.BadParameter, match=f"less than or equal to 65535, got 99999; see {path}"):
        run("serve", "--config", str(path))
    with pytest.raises(typer.BadParameter, match=r"less than or equal to 65535, got '99999'$"):
        run("serve", "--port", "99999")
