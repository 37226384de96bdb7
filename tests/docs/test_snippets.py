"""Snippets of the documents: Python is run, JSON and YAML are read by the classes that read them from users."""

import contextlib
import importlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import llm
from cluster.cli import main
from cluster.ray_serve.arguments import ServeArguments
from proposers import registry
from protos.config import argument_names, arguments, speculation
from protos.config.engine import SpeculativeConfig
from protos.sampling import SamplingParams
from runtime.core.stats import EngineStats
from runtime.http.schemas import ChatCompletionRequest, CompletionRequest
from runtime.metrics.prometheus import Metrics
from tests.docs.test_commands import flags
from tests.support.documents import ROOT, Piece, blocks, spans
from tests.support.serving import grpc_server, http_server
from tests.support.serving.fake_engine import expected, local_engine

HTTP, GRPC = "http://localhost:8000", "localhost:9000"
BODIES = {"POST /v1/completions": CompletionRequest, "POST /v1/chat/completions": ChatCompletionRequest}
SPECULATIVE = speculation.KNOWN
PYTHON = blocks("python")
METHOD_ROW = re.compile(r"^\| `(\w+)` \|", re.M)


def ids(pieces: list[Piece]) -> list[str]:
    return [str(piece) for piece in pieces]


LLM = llm.LLM


class Shared(LLM):
    """The demo pair, loaded once; arguments are parsed as usual, but the models that they name are not loaded."""

    _loaded: LLM | None = None

    def __init__(self, model: str | None = None, **given: Any) -> None:
        arguments.parse({"model": model or "demo", **given}, methods=registry.names())
        self.__dict__ = type(self).loaded().__dict__

    @classmethod
    def loaded(cls) -> LLM:
        if cls._loaded is None:
            cls._loaded = LLM(enforce_eager=True, max_model_len=512)
        return cls._loaded

    def shutdown(self) -> None:
        """It is shared."""


@pytest.fixture(scope="module")
def shared() -> Iterator[type[Shared]]:
    yield Shared
    if Shared._loaded is not None:
        Shared._loaded.shutdown()


def run(code: str) -> str:
    """Return what a snippet prints. Its HTTP client is closed: collected open, it may warn of its connection."""
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "snippet", "exec"), names)
    if "client" in names:
        names["client"].close()
    return printed.getvalue()


ALONE = [block for block in PYTHON if HTTP not in block.text and GRPC not in block.text and not block.title]


@pytest.mark.parametrize("block", ALONE, ids=ids(ALONE))
def test_python_prints_an_answer(block: Piece, shared: type[Shared], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "LLM", shared)
    assert run(block.text).strip()


def test_the_http_client_streams_an_answer() -> None:
    [block] = [block for block in PYTHON if HTTP in block.text and "client.completions" in block.text]
    with http_server.serving(local_engine()) as served:
        printed = run(block.text.replace(HTTP, served.url).replace('model="demo"', 'model="fake"'))
    assert printed == expected("def add(a, b):", 64)


def test_a_response_is_printed() -> None:
    [block] = [block for block in PYTHON if HTTP in block.text and "client.responses" in block.text]
    with http_server.serving(local_engine()) as served:
        printed = run(block.text.replace(HTTP, served.url).replace('model="demo"', 'model="fake"'))
    assert printed.startswith(expected("[system] Be brief.\n[user] Add two numbers.\n[bot]", 100))


def test_a_message_is_streamed() -> None:
    [block] = [block for block in PYTHON if HTTP in block.text and "client.messages" in block.text]
    with http_server.serving(local_engine()) as served:
        printed = run(block.text.replace(HTTP, served.url).replace('model="demo"', 'model="fake"'))
    assert printed == expected("[system] Be brief.\n[user] Add two numbers.\n[bot]", 100)


def test_the_grpc_client_streams_an_answer() -> None:
    [block] = [block for block in PYTHON if GRPC in block.text]
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none")
    with grpc_server.serving(local_engine(speculative=drafts)) as served:
        text, counts = run(block.text.replace(GRPC, served.address)).splitlines()
    assert text == expected("def fibonacci(n):", 64)
    accepted, _, proposed, *_ = counts.split()
    assert 0 < int(accepted) < int(proposed)
    assert len(block.text.splitlines()) == 10


def test_a_proposer_of_your_own_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [block for block in PYTHON if block.title]
    (tmp_path / block.title).write_text(block.text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    [config] = [json.loads(each.text) for each in blocks("json") if Path(block.title).stem in each.text]
    with LLM(enforce_eager=True, max_model_len=128, speculative_config=config) as engine:
        engine.generate("x = [0, 0, 0, 0, 0,", SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
        assert engine.stats().proposed > 0


REPLAY, PREDICTION, _TUNING, _COMPARISON = (
    block.text for block in blocks("bash") if block.document.name == "simulation.md"
)


def run_commands(text: str, *more: str) -> None:
    for command in text.splitlines():
        program, *words = shlex.split(command)
        assert program == "slipstream"
        main.app([*words, *more, "--max-model-len", "512"], standalone_mode=False)


def test_the_simulation_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_commands(REPLAY)
    printed = capsys.readouterr().out
    for name in ("draft_model draft, K = 4", "suffix, K = ", "ngram, K = 4"):
        assert name in printed
    assert len((tmp_path / "matched.jsonl").read_text().splitlines()) == 3


@pytest.mark.full
def test_the_prediction_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_commands(REPLAY.splitlines()[0])
    run_commands(PREDICTION if find_spec("matplotlib") else PREDICTION.replace("--png drafts.png", ""))
    assert "best K by batch size" in capsys.readouterr().out
    assert (tmp_path / "drafts.html").is_file()


JSON = blocks("json")


@pytest.mark.parametrize("block", JSON, ids=ids(JSON))
def test_json_is_accepted(block: Piece) -> None:
    value = json.loads(block.text)
    if block.title == "speculative_config":
        _read_speculation(value)
    elif block.title:
        body = BODIES[block.title]
        body.model_validate(body.screened(value))


def _read_speculation(value: dict[str, Any]) -> None:
    """Raises `ConfigError` for a key, a value or a method that does not exist."""
    given = value.get("method")
    names = [given] if isinstance(given, str) else given or []
    speculation.read(value, [*registry.names(), *(name for name in names if ":" in name)])


YAML = blocks("yaml")


@pytest.mark.parametrize("block", YAML, ids=ids(YAML))
def test_yaml_is_accepted(block: Piece) -> None:
    value = yaml.safe_load(block.text)
    if block.title == "args":
        ServeArguments.model_validate(value)
    else:
        assert {f"--{key.replace('_', '-')}" for key in value} <= flags()
        arguments.parse({key: value[key] for key in value.keys() & argument_names.NAMES}, methods=registry.names())


FRAGMENTS = [span for span in spans() if re.match(r'"\w+": ', span.text)]


@pytest.mark.parametrize("span", FRAGMENTS, ids=[f"{span} {span.text}" for span in FRAGMENTS])
def test_fragments_of_json_are_accepted(span: Piece) -> None:
    value = json.loads("{" + span.text + "}")
    if not value.keys() <= SPECULATIVE:
        CompletionRequest.model_validate({"model": "demo", "prompt": "x", **value})


@pytest.mark.parametrize("name", ["README.md", "docs/speculation.md"])
def test_the_tables_of_methods_are_complete(name: str) -> None:
    text = (ROOT / name).read_text()
    table = text[text.index("## Methods") :].partition("\n\n**")[0]
    rows = METHOD_ROW.findall(table[: table.index("\n\n", table.index("|---"))])
    assert sorted(rows) == sorted(registry.names())


def test_the_table_of_speculative_options_is_complete() -> None:
    text = (ROOT / "docs/speculation.md").read_text()
    section = text[text.index("## Options") : text.index("## Policies")]
    keys = {
        key
        for line in section.splitlines()
        if line.startswith("| `")
        for key in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
    assert keys == SPECULATIVE


def test_the_list_of_sampling_options_is_complete() -> None:
    text = (ROOT / "docs/serving.md").read_text()
    section = text[text.index("## Sampling options") :].split("\n\n")[1]
    assert set(re.findall(r"`(\w+)`", section)) == {field.name for field in fields(SamplingParams)} - {"prediction"}


def test_metrics_exist() -> None:
    metrics = Metrics("fake")
    metrics.use_stats(lambda: EngineStats(predicted_speedup=1.0))
    published = metrics.render().decode()
    named = {
        name
        for span in spans()
        for name in re.findall(r"\b(slipstream_\w+)", span.text)
        if span.document.name in ("operations.md", "serving.md")
    }
    missing = {name for name in named if name not in published} - {"slipstream_"}
    assert named
    assert not missing


def test_wrong_keys_are_noticed() -> None:
    with pytest.raises(Exception, match="metod"):
        _read_speculation({"metod": "ngram"})
    with pytest.raises(Exception, match="no_such"):
        arguments.parse({"model": "m", "no_such": 1})
