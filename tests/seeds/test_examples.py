"""Snippets and commands written for vLLM run; only import, program and model are changed."""

import contextlib
import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import slipstream
from cluster.cli import main as cli
from cluster.cli import serve as cli_serve
from cluster.settings import engine_config
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError
from tests.seeds.snippets import (
    CLIENT,
    DRAFT_MODEL,
    DRAFTS,
    EAGLE,
    EAGLE_ASCEND,
    HEADS,
    MLP_SPECULATOR,
    NGRAM,
    NGRAM_ASCEND,
    SERVE,
    SERVE_MTP,
    SERVE_REMOVED,
    SUFFIX,
    TARGET_ALONE,
    TARGETS,
)
from tests.support.models import synthetic, synthetic_layers, tiny_pairs

ROOT = Path(__file__).parents[2]
PROGRAM = re.compile(r"^(python -m vllm\.entrypoints\.openai\.api_server|vllm serve)", re.MULTILINE)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("opt"), "opt")


@pytest.fixture(scope="module")
def llama_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("llama"), "llama")


def adapted(text: str, models: tuple[Path, Path] | None = None) -> str:
    """Change import, program and, where *models* are given, the model names."""
    text = PROGRAM.sub("slipstream serve", text.replace("from vllm", "from slipstream"))
    if models is None:
        return text
    target, draft = map(str, models)
    for name in sorted(TARGETS, key=len, reverse=True):
        text = text.replace(name, target)
    for name in DRAFTS:
        text = text.replace(name, draft)
    return text


def run(text: str) -> dict[str, Any]:
    """Run a snippet; return its variables."""
    names: dict[str, Any] = {}
    exec(compile(text, "snippet", "exec"), names)
    return names


def config_of(command: str, monkeypatch: pytest.MonkeyPatch) -> tuple[EngineConfig, Any]:
    """Return what the command would have served, with which options."""
    served: list[tuple[EngineConfig, Any]] = []
    monkeypatch.setattr(cli_serve, "serve", lambda config, options: served.append((config, options)))
    program, *arguments = shlex.split(command.replace("\\\n", " "))
    assert program == "slipstream"
    cli.app(arguments, standalone_mode=False)
    (only,) = served
    return only


@pytest.mark.parametrize(
    ("snippet", "proposes"),
    [
        pytest.param(DRAFT_MODEL, True, id="draft_model"),
        pytest.param(NGRAM, False, id="ngram", marks=pytest.mark.full),  # each compiles a model; see the one on llama
    ],
)
def test_offline_snippets_run(
    snippet: str, proposes: bool, pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    names = run(adapted(snippet, pair))
    output = names["outputs"][0]
    assert capsys.readouterr().out.startswith("Prompt: 'The future of AI is', Generated text: ")
    assert (output.finished, output.prompt) == (True, "The future of AI is")
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    if proposes:
        assert output.speculation.num_draft_tokens > 0
    names["llm"].shutdown()


def test_the_ngram_snippet_runs_on_llama(llama_pair: tuple[Path, Path]) -> None:
    names = run(adapted(NGRAM_ASCEND, llama_pair))
    assert names["llm"].config.speculative == SpeculativeConfig(
        "ngram", num_speculative_tokens=5, prompt_lookup_min=4, prompt_lookup_max=4, placement="colocated"
    )
    assert names["generated_text"] == names["outputs"][0].outputs[0].text
    names["llm"].shutdown()


@pytest.mark.full
def test_the_snippet_without_speculation_runs(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    names = run(adapted(TARGET_ALONE, pair))
    assert capsys.readouterr().out.count("Generated text: ") == 2
    assert len(names["outputs"][0].outputs[0].token_ids) == 1
    assert names["outputs"][0].speculation.num_draft_tokens == 0
    names["llm"].shutdown()


def test_the_suffix_snippet_runs(llama_pair: tuple[Path, Path]) -> None:
    names = run(adapted(SUFFIX, llama_pair))
    assert names["llm"].config.speculative.method == "suffix"
    assert names["generated_text"] == names["outputs"][0].outputs[0].text
    names["llm"].shutdown()


@pytest.mark.full
@pytest.mark.parametrize(
    ("snippet", "write"),
    [
        (MLP_SPECULATOR, synthetic.mlp_speculator),
        (EAGLE, synthetic_layers.eagle),
        (EAGLE_ASCEND, synthetic_layers.eagle),
    ],
    ids=["mlp_speculator", "eagle", "eagle on ascend"],
)
def test_snippets_with_heads_run(
    snippet: str,
    write: Callable[[Path], synthetic.Synthetic],
    ray_cluster: Any,
    llama_pair: tuple[Path, Path],
    tmp_path: Path,
) -> None:
    """With four target ranks and a draft worker as in the snippets; tiny checkpoints in their public formats."""
    target, _ = llama_pair
    names = run(adapted(snippet, (target, write(target).write(tmp_path / "heads"))))
    assert names["llm"].config.parallel.tensor_parallel_size == 4
    assert names["outputs"][0].speculation.num_draft_tokens > 0
    names["llm"].shutdown()


@pytest.mark.parametrize("name", HEADS)
def test_snippets_with_heads_and_histories_are_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checkpoints are not available, so only the parsed config is checked; K is not part of any name."""
    snippet, wanted = HEADS[name]
    built: list[EngineConfig] = []

    def build(model: str, **arguments: Any) -> None:
        built.append(engine_config({"model": model, **arguments}))
        raise LookupError("far enough")

    monkeypatch.setattr(slipstream, "LLM", build, raising=False)
    with pytest.raises(LookupError, match="far enough"):
        run(adapted(snippet))
    (config,) = built
    assert config.speculative is not None
    assert (config.speculative.method, config.speculative.num_speculative_tokens) == wanted


def test_the_server_command(monkeypatch: pytest.MonkeyPatch) -> None:
    config, options = config_of(adapted(SERVE), monkeypatch)
    assert (options.http.host, options.http.port) == ("0.0.0.0", 8000)
    assert (config.model.model, config.seed, config.cache.memory_utilization) == ("facebook/opt-6.7b", 42, 0.8)
    assert config.parallel.executor == "uni"
    assert config.speculative == SpeculativeConfig("draft_model", 5, model="facebook/opt-125m", placement="colocated")


def test_the_removed_flags_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_of(adapted(SERVE_REMOVED), monkeypatch) == config_of(adapted(SERVE), monkeypatch)


def mtp_command(target: Path) -> str:
    """Return the command with the folder *target*, which exists."""
    return adapted(SERVE_MTP).replace("/deepseek-ai/DeepSeek-V3.2-Exp-W8A8", str(target))


def test_the_mtp_command_means_the_targets_own_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = config_of(mtp_command(tmp_path).replace("--quantization ascend", ""), monkeypatch)
    assert config.speculative == SpeculativeConfig("mtp", 2, placement="dedicated")


def test_the_rest_of_the_mtp_command_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.sub(r"\\\n  --speculative-config.*", "", mtp_command(tmp_path))
    with pytest.raises(ConfigError, match=r"quantization must be one of .*got 'ascend'"):
        config_of(command, monkeypatch)
    config, options = config_of(command.replace("--quantization ascend", ""), monkeypatch)
    assert options.http.port == 20004
    assert (config.model.model, config.model.max_model_len) == (str(tmp_path), 36768)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (10, 5000)
    assert (config.parallel.tensor_parallel_size, config.parallel.executor) == (16, "ray")
    assert (config.seed, config.served_model_name) == (1024, ("dsv3",))


def test_several_devices_parse() -> None:
    config = engine_config({"model": "m", "tensor_parallel_size": 4, "distributed_executor_backend": "mp"})
    assert config.parallel.executor == "ray"


# The server and its client, for real


@contextlib.contextmanager
def served(command: str) -> Iterator[None]:
    """Start *command*, wait until it is ready, and stop it afterwards."""
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "slipstream", *arguments]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as server:
        assert server.stderr is not None
        try:
            said = list(itertools.takewhile(lambda text: "ready on" not in text, server.stderr))
            assert server.poll() is None, "".join(said)
            yield
        finally:
            server.terminate()
            server.communicate(timeout=60)


def _free_port() -> int:
    with socket.create_server(("localhost", 0)) as probe:
        return int(probe.getsockname()[1])


def test_the_client_snippet_against_the_server_command(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    port = str(_free_port())  # 8000 may be taken where tests run
    with served(adapted(SERVE, pair).replace("8000", port)):
        names = run(CLIENT.replace("8000", port))
    assert capsys.readouterr().out.startswith("Completion results:\nCompletion(id=")
    assert names["completion"].choices[0].finish_reason in ("stop", "length")
    names["client"].close()
