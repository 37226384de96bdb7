"""The command line: options in all spellings, results, and one-line errors."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from cluster.cli import bench
from cluster.cli import env as cli_env
from cluster.cli import main as cli
from cluster.cli.env import version
from protos.config import argument_names, arguments
from protos.config.engine import EngineConfig
from protos.errors import ConfigError, InvalidRequestError, SlipstreamError
from tests.cluster.cli.conftest import run
from tests.support.models import tiny_pairs
from tests.support.processes import slipstream

ROOT = Path(__file__).parents[3]
SMALL = ["--dtype", "float32", "--num-gpu-blocks-override", "128", "--enforce-eager"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")


def model_options(pair: tuple[Path, Path]) -> list[str]:
    speculative = json.dumps({"model": str(pair[1]), "num_speculative_tokens": 3})
    return ["--model", str(pair[0]), "--speculative-config", speculative, *SMALL]


# Spellings


@pytest.mark.parametrize(
    "given",
    [
        ["serve", "m", "--tensor-parallel-size", "2", "--max-model-len", "64"],
        ["serve", "--model", "m", "--tensor_parallel_size", "2", "--max_model_len=64"],
        ["serve", "-tp", "2", "--max-model-len=64", "m"],
        ["serve", "m", "--tp", "2", "--max-seq-len", "64"],
    ],
)
def test_hyphens_underscores_short_forms_and_a_positional_model(
    given: list[str], served: list[tuple[EngineConfig, Any]]
) -> None:
    run(*given)
    ((config, options),) = served
    assert (config.model.model, config.model.max_model_len) == ("m", 64)
    assert (config.parallel.tensor_parallel_size, config.parallel.executor) == (2, "ray")
    assert (options.http.port, options.version) == (8000, version())


def test_switches_have_two_sides(served: list[tuple[EngineConfig, Any]]) -> None:
    run("serve", "m", "--no-enable-prefix-caching", "--enforce_eager", "--trust-remote-code")
    ((config, _),) = served
    assert (config.cache.enable_prefix_caching, config.model.enforce_eager) == (False, True)


@pytest.mark.parametrize(
    "given", [["--served-model-name", '["a", "b"]'], ["--served-model-name=a", "--served-model-name=b"]]
)
def test_names_in_the_api(given: list[str], tmp_path: Path, served: list[tuple[EngineConfig, Any]]) -> None:
    (tmp_path / "config.yaml").write_text("served_model_name: abc\n")
    run("serve", "m", *given)
    run("serve", "m", "--config", str(tmp_path / "config.yaml"))
    run("serve", "m")
    assert [config.served_model_name for config, _ in served] == [("a", "b"), ("abc",), ()]


def test_every_engine_argument_is_an_option(served: list[tuple[EngineConfig, Any]]) -> None:
    values = {
        "dtype": "half",
        "kv_cache_dtype": "int8",
        "quantization": "int8",
        "device": "cpu",
        "distributed_executor_backend": "mp",
        "gpu_memory_utilization": "0.5",
        "placement_strategy": "PACK",
        "worker_resources": '{"CPU": 2}',
        "log_format": "json",
        "spare_workers": "2",
    }
    given = ["serve"]
    for option in argument_names.KEPT:
        flag = "--" + option.name.replace("_", "-")
        given += [flag] if option.is_flag else [flag, values.get(option.name, "64")]
    run(*given)
    ((config, _),) = served
    python = {o.name: True if o.is_flag else values.get(o.name, "64") for o in argument_names.KEPT}
    assert config == arguments.parse(python)


def test_a_chat_template_is_a_file_or_itself(tmp_path: Path, served: list[tuple[EngineConfig, Any]]) -> None:
    path = tmp_path / "template.jinja"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text("{{ messages }}", encoding=encoding)
        run("serve", "m", "--chat-template", str(path))
    run("serve", "m", "--chat-template", "{{ messages }}")
    assert [options.chat_template for _, options in served] == ["{{ messages }}"] * 3


@pytest.mark.parametrize(
    ("given", "error", "says"),
    [
        (["serve", "a", "--model", "b"], ConfigError, "given twice"),
        (["serve", "m", "--quantization", "ascend"], ConfigError, "quantization must be one of"),
        (["serve", "m", "--chat-template", "/nowhere"], ConfigError, "chat_template: cannot read /nowhere"),
        (["serve", "m", "--per-request-spec-decode-metrics", "all"], ConfigError, "must be one of none"),
        (["generate"], ConfigError, "give one prompt"),
        (["generate", "x", "--prompts", "f"], ConfigError, "give one prompt"),
        (["generate", ""], ConfigError, "prompt must not be empty"),
        (["generate", "--prompts", "f"], ConfigError, "--output"),
        (["generate", "--prompts", "/nowhere", "--output", "o"], ConfigError, "cannot read /nowhere"),
        (["generate", "x", "--temperature", "nan"], InvalidRequestError, "temperature must be finite"),
        (["generate", "x", "--max-model-len", "0"], ConfigError, "max_model_len must be greater than 0"),
        (["doctor", "--output", "f"], ConfigError, "--full and --output are options of --gpu"),
        (["doctor", "--full"], ConfigError, "--full and --output are options of --gpu"),
    ],
)
def test_refusals(
    given: list[str], error: type[SlipstreamError], says: str, served: list[tuple[EngineConfig, Any]]
) -> None:
    with pytest.raises(error, match=says):
        run(*given)


# As users run it


def test_errors_are_one_line_and_status_2() -> None:
    ran = slipstream("generate", "x", "--quantization", "ascend")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("slipstream: error: quantization must be one of 'int8', 'int4'")
    assert ran.stderr.count("\n") == 1


def test_unknown_options_get_a_hint_and_status_2() -> None:
    ran = slipstream("generate", "x", "--max-modl-len", "4")
    assert ran.returncode == 2
    assert "--max-model-len" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_generate_streams_and_ends_with_figures(pair: tuple[Path, Path]) -> None:
    ran = slipstream("generate", "def main", "--max-tokens", "24", "--ignore-eos", *model_options(pair))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("def main")
    assert "24 tokens in " in ran.stderr
    assert " tokens/s" in ran.stderr
    assert "mean acceptance length: " in ran.stderr
    assert "acceptance per position: " in ran.stderr


def test_batches_go_from_file_to_file(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = ['"plain"', '{"prompt": "x", "max_tokens": 3}', "", '{"prompt_token_ids": [5, 6], "n": 2, "seed": 1}']
    source.write_text("\n".join(lines))
    options = ["--max-tokens", "5", "--temperature", "1", "--ignore-eos", *model_options(pair)]
    run("generate", "--prompts", str(source), "--output", str(target), *options)
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["prompt"] for result in results] == ["plain", "x", None]
    assert [[len(sample["token_ids"]) for sample in result["outputs"]] for result in results] == [[5], [3], [5, 5]]
    assert results[0]["speculative_decoding"]["num_spec_steps"] > 0
    assert "3 prompts written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", ":1 is not JSON"),
        ("[" * 100_000, ":1 is not JSON: it is nested too deeply"),
        ("5", ":1 must be a string"),
        ('{"prompt": "x", "tempratur": 1}', ":1: unknown argument"),
        ("", "has no prompts"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_loaded(tmp_path: Path, line: str, says: str) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(line)
    with pytest.raises(SlipstreamError, match=says):
        run("generate", "--prompts", str(source), "--output", str(tmp_path / "out"), "--model", "none")


def test_ctrl_c_before_a_command_runs_prints_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == cli.INTERRUPTED


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.run(["latency"])
    assert ended.value.code == cli.FAILED
    assert "No such command 'latency'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        cli._show_version(True)
    assert capsys.readouterr().out == f"slipstream {version()}\n"


def test_env_tells_versions_processor_and_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    run("env", "--max-num-seqs", "7")
    shown = capsys.readouterr().out
    for word in ("Packages", "torch: ", "flags: ", "CUDA: ", "RAY_ADDRESS: ", "cluster: ", '"max_num_seqs":7'):
        assert word in shown


def test_env_survives_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "cannot be imported" in dict(cli_env._devices())["torch"]
    assert cli_env._proc("/no/such/file") == {}


IMPORT = """
import sys, slipstream
slipstream.SamplingParams
assert not {"torch", "ray", "transformers"} & set(sys.modules)
"""


def test_importing_slipstream_is_light() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr


def without_ray(*given: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.modules['ray'] = None; from cluster.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )


def test_without_ray_the_command_line_generates(pair: tuple[Path, Path]) -> None:
    ran = without_ray("generate", "x", "--max-tokens", "4", *model_options(pair))
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("command", [("generate", "x"), ("serve", "--port", "0")])
def test_without_ray_several_workers_are_refused(pair: tuple[Path, Path], command: tuple[str, ...]) -> None:
    ran = without_ray(*command, "-tp", "2", *model_options(pair))
    assert ran.returncode == cli.FAILED
    assert "slipstream: error: several workers need Ray, which cannot be loaded (" in ran.stderr.splitlines()[-1]
    assert "Traceback" not in ran.stderr


def test_a_folder_that_does_not_exist_is_one_line() -> None:
    ran = slipstream("serve", "./nosuch", "--port", "0", "--grpc-port", "0")
    assert (ran.returncode, ran.stderr) == (cli.FAILED, "slipstream: error: no such folder: ./nosuch\n")
