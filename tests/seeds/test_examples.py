"""Every snippet and command of the documents this project came from; only import, program and model are changed."""

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
from tests.support.models import synthetic, synthetic_layers, tiny_pairs

ROOT = Path(__file__).parents[2]
HEAD = """
from vllm import LLM, SamplingParams

prompts = [
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
"""
TAIL = """
outputs = llm.generate(prompts, sampling_params)

for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Prompt: {prompt!r}, Generated text: {generated_text!r}")
"""
DRAFT_MODEL = (
    HEAD
    + """
llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_config={
        "model": "facebook/opt-125m",
        "num_speculative_tokens": 5,
    },
)
"""
    + TAIL
)
NGRAM = (
    HEAD
    + """
llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    speculative_config={
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
    },
)
"""
    + TAIL
)
NGRAM_ASCEND = NGRAM.replace("facebook/opt-6.7b", "meta-llama/Meta-Llama-3.1-8B-Instruct")
MLP_SPECULATOR = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-70B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "ibm-ai-platform/llama3-70b-accelerator",
        "draft_tensor_parallel_size": 1,
    },
)
"""
    + TAIL
)
EAGLE = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3-8B-Instruct",
    tensor_parallel_size=4,
    speculative_config={
        "model": "yuhuili/EAGLE-LLaMA3-Instruct-8B",
        "draft_tensor_parallel_size": 1,
    },
)
"""
    + TAIL
)
EAGLE_ASCEND = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    tensor_parallel_size=4,
    distributed_executor_backend="mp",
    enforce_eager=True,
    async_scheduling=True,
    speculative_config={
        "method": "eagle",
        "model": "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens": 2,
    },
)
"""
    + TAIL
)
SUFFIX = (
    HEAD
    + """
llm = LLM(
    model="meta-llama/Meta-Llama-3.1-8B-Instruct",
    tensor_parallel_size=1,
    enforce_eager=True,
    speculative_config={
        "method": "suffix",
        "num_speculative_tokens": 15,
    },
)
"""
    + TAIL
)
TARGET_ALONE = """
from vllm import LLM, SamplingParams

llm = LLM(
    model="facebook/opt-6.7b",
    tensor_parallel_size=1,
    use_v2_block_manager=True,
)
sampling_params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2, top_k=1)
prompts = [
'I am at KDD conference in Barcelona. After the conference tutorial today I will be presenting a paper on the topic of “The role of the brain in the development',
]
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Generated text: {generated_text!r}")
sampling_params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=1, top_k=1)
prompts = [
'I am at KDD conference in Barcelona. After the conference tutorial today I will be presenting a paper on the topic of “The role of the brain in the development of',
]
outputs = llm.generate(prompts, sampling_params)
for output in outputs:
    prompt = output.prompt
    generated_text = output.outputs[0].text
    print(f"Generated text: {generated_text!r}")
"""  # noqa: E501 - as it was written
SERVE = """
python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 --model facebook/opt-6.7b \\
    --seed 42 -tp 1 --gpu_memory_utilization 0.8 \\
    --speculative_config '{"model": "facebook/opt-125m", "num_speculative_tokens": 5}'
"""
CLIENT = """
from openai import OpenAI

# Modify OpenAI's API key and API base to use vLLM's API server.
openai_api_key = "EMPTY"
openai_api_base = "http://localhost:8000/v1"

client = OpenAI(
    # defaults to os.environ.get("OPENAI_API_KEY")
    api_key=openai_api_key,
    base_url=openai_api_base,
)

models = client.models.list()
model = models.data[0].id

# Completion API
stream = False
completion = client.completions.create(
    model=model,
    prompt="The future of AI is",
    echo=False,
    n=1,
    stream=stream,
)

print("Completion results:")
if stream:
    for c in completion:
        print(c)
else:
    print(completion)
"""
SERVE_MTP = """
vllm serve /deepseek-ai/DeepSeek-V3.2-Exp-W8A8 \\
  --port 20004 \\
  --data-parallel-size 1 \\
  --tensor-parallel-size 16 \\
  --enable-expert-parallel \\
  --seed 1024 \\
  --served-model-name dsv3 \\
  --max-model-len 36768 \\
  --max-num-batched-tokens 5000 \\
  --max-num-seqs 10 \\
  --quantization ascend \\
  --trust-remote-code \\
  --gpu-memory-utilization 0.9 \\
  --compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}' \\
  --speculative-config '{"num_speculative_tokens": 2, "method":"deepseek_mtp", "disable_padded_drafter_batch": "False"}'
"""
# The removed flags of the same documents, as scripts still have them.
SERVE_REMOVED = """
python -m vllm.entrypoints.openai.api_server --host 0.0.0.0 --port 8000 --model facebook/opt-6.7b \\
    --seed 42 -tp 1 --speculative_model facebook/opt-125m --use-v2-block-manager \\
    --num_speculative_tokens 5 --gpu_memory_utilization 0.8
"""
HEADS = {
    "mlp_speculator": (MLP_SPECULATOR, ("mlp_speculator", 5)),
    "eagle": (EAGLE, ("eagle", 5)),
    "eagle on ascend": (EAGLE_ASCEND, ("eagle", 2)),
    "suffix": (SUFFIX, ("suffix", 15)),
}
TARGETS = (
    "facebook/opt-6.7b",
    "meta-llama/Meta-Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-70B-Instruct",
)
DRAFTS = (
    "facebook/opt-125m",
    "ibm-ai-platform/llama3-70b-accelerator",
    "yuhuili/EAGLE-LLaMA3-Instruct-8B",
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
)
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
    """Run a snippet; return what it defined."""
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
    """Four target ranks and a draft worker, as they ask for; the checkpoints are tiny ones in their public formats."""
    target, _ = llama_pair
    names = run(adapted(snippet, (target, write(target).write(tmp_path / "heads"))))
    assert names["llm"].config.parallel.tensor_parallel_size == 4
    assert names["outputs"][0].speculation.num_draft_tokens > 0
    names["llm"].shutdown()


@pytest.mark.parametrize("name", HEADS)
def test_snippets_with_heads_and_histories_are_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their checkpoints are out of reach, so what the engine would be built from is looked at; no name tells K."""
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


def test_the_mtp_command_means_the_targets_own_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = config_of(adapted(SERVE_MTP).replace("--quantization ascend", ""), monkeypatch)
    assert config.speculative == SpeculativeConfig("mtp", 2, placement="dedicated")


def test_the_rest_of_the_mtp_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    command = re.sub(r"\\\n  --speculative-config.*", "", adapted(SERVE_MTP))
    with pytest.raises(ConfigError, match="quantization is not supported, got 'ascend'"):
        config_of(command, monkeypatch)
    config, options = config_of(command.replace("--quantization ascend", ""), monkeypatch)
    assert options.http.port == 20004
    assert (config.model.model, config.model.max_model_len) == ("/deepseek-ai/DeepSeek-V3.2-Exp-W8A8", 36768)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (10, 5000)
    assert (config.parallel.tensor_parallel_size, config.parallel.executor) == (16, "ray")
    assert (config.seed, config.served_model_name) == (1024, ("dsv3",))


def test_several_devices_parse() -> None:
    config = engine_config({"model": "m", "tensor_parallel_size": 4, "distributed_executor_backend": "mp"})
    assert config.parallel.executor == "ray"


# The server and its client, for real


@contextlib.contextmanager
def served(command: str) -> Iterator[None]:
    """Run *command* from when it says it is ready; stop it afterwards."""
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
