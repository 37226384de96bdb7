"""Logs of answers: `slipstream generate --log`, and the server's log of requests that ask for it."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from cluster.cli import main as cli
from protos.errors import ConfigError
from protos.sampling import SamplingParams
from protos.seeds import mix_seed
from runtime.text.output_log import LoggedOutput, OutputLog, logged_sampling
from slipstream import LLM
from tests.support.models import tiny_pairs
from tests.support.serving import fake_engine
from tests.support.serving.http_server import serving

SMALL = ["--dtype", "float32", "--num-gpu-blocks-override", "128", "--enforce-eager"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")


def generate(pair: tuple[Path, Path], *given: str, rule: str = "coupled") -> None:
    asked = {"model": str(pair[1]), "num_speculative_tokens": 3, "rejection_sample_method": rule}
    speculative = json.dumps(asked)
    options = ["--model", str(pair[0]), "--speculative-config", speculative, *SMALL]
    cli.app(["generate", *given, *options], standalone_mode=False)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_logged_parameters_give_the_logged_tokens_again(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, log = tmp_path / "in.jsonl", tmp_path / "log.jsonl"
    source.write_text('{"prompt": "abc", "n": 2, "top_k": 20}\n{"prompt_token_ids": [5, 6], "temperature": 0}\n')
    generate(pair, "--prompts", str(source), "--log", str(log), "--temperature", "1", "--max-tokens", "6")
    first, second, greedy = logged = lines(log)
    assert [one.get("prompt") for one in logged] == ["abc", "abc", None]
    assert second["sampling"]["seed"] == mix_seed(first["sampling"]["seed"], 1)
    assert (first["sampling"]["top_k"], greedy["sampling"]["temperature"]) == (20, 0.0)
    assert {one["model"] for one in logged} == {str(pair[0])}
    with LLM(str(pair[0]), dtype="float32", num_gpu_blocks_override=128, enforce_eager=True) as llm:
        for one in logged:
            params = SamplingParams(**one["sampling"])
            found = llm.generate({"prompt_token_ids": one["prompt_token_ids"]}, params, use_tqdm=False)[0].outputs[0]
            assert (found.token_ids, found.text) == (one["output_token_ids"], one["output"])
            assert found.finish_reason == one["finish_reason"]


def test_seeds_that_were_mixed_are_not_logged(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Under rejection sampling the engine uses other seeds than those that are asked for."""
    source, log = tmp_path / "in.jsonl", tmp_path / "log.jsonl"
    source.write_text('{"prompt": "abc", "n": 2, "seed": 3}\n{"prompt": "abc"}\n')
    generate(pair, "--prompts", str(source), "--log", str(log), "--max-tokens", "3", rule="standard")
    generate(pair, "abc", "--log", str(log), "--seed", "3", "--max-tokens", "3", rule="standard")
    assert [one["sampling"]["seed"] for one in lines(log)] == [None] * 4


def test_a_streamed_answer_is_added_with_the_log_probabilities_asked_for(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    for _ in range(2):
        generate(pair, "abc", "--log", str(log), "--top-logprobs", "3", "--max-tokens", "4", "--ignore-eos")
    one, other = lines(log)
    assert one == {**other, "sampling": one["sampling"], "logprobs": one["logprobs"]}
    # The number of draft tokens adapts to measured time, and with it the rounding of a forward pass.
    for top, same in zip(one["logprobs"], other["logprobs"], strict=True):
        assert top == pytest.approx(same, abs=1e-4)
    assert len(one["output_token_ids"]) == len(one["logprobs"]) == 4
    for token, top in zip(one["output_token_ids"], one["logprobs"], strict=True):
        assert next(iter(top)) == str(token)  # greedy: the sampled token is the most likely one
        assert len(top) == 3
        assert max(top.values()) == top[str(token)]
    assert log.stat().st_mode & 0o077 == 0


def test_a_line_begins_after_one_that_was_not_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt": "a", "output": "b"}')
    entry, written = LoggedOutput([1], [2]), os.write

    def fail(file: int, data: bytes) -> int:
        written(file, data[:3])
        raise OSError("no space left")

    with OutputLog(path) as log:
        assert path.read_text().endswith("}")
        log.write(entry)
        monkeypatch.setattr(os, "write", fail)
        with pytest.raises(OSError, match="no space left"):
            log.write(entry)
        monkeypatch.undo()
        log.write(entry)
    with OutputLog(path) as log:
        log.write(entry)
    line = '{"prompt_token_ids":[1],"output_token_ids":[2]}'
    assert path.read_text().splitlines() == ['{"prompt": "a", "output": "b"}', line, line[:3], line, line]


def test_defaults_are_left_out_of_logged_parameters() -> None:
    params = SamplingParams(stop="x", logit_bias={3: 1.0}, n=4, logprobs=2, max_tokens=None)
    found = json.loads(json.dumps(logged_sampling(params, 7)))
    assert found == {"temperature": 1.0, "max_tokens": None, "seed": 7, "stop": ["x"], "logit_bias": {"3": 1.0}}
    assert SamplingParams(**found) == SamplingParams(stop="x", logit_bias={3: 1.0}, max_tokens=None, seed=7)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--log", "/nowhere/log"], "cannot write the log /nowhere/log: No such file"),
        (["--top-logprobs", "2"], "--top-logprobs needs --log"),
    ],
)
def test_refusals(given: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        cli.app(["generate", "x", "--model", "none", *given], standalone_mode=False)


HEADER = "x-slipstream-log-output"


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_logs_only_requests_that_ask_for_it(tmp_path: Path, stream: bool) -> None:
    log = tmp_path / "log.jsonl"
    body = {"prompt": "the quick", "max_tokens": 5, "n": 2, "temperature": 0.5, "stream": stream, "model": "fake"}
    with OutputLog(log) as opened, serving(fake_engine.local_engine(), output_log=opened, target="t") as served:
        for headers in ({}, {HEADER: "0"}, {HEADER: "1"}, {}):
            answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=60)
            assert answer.status_code == 200
        assert len(lines(log)) == 2
        failed = httpx.post(f"{served.url}/v1/completions", json={**body, "n": 0}, headers={HEADER: "1"}, timeout=60)
        assert failed.status_code == 400
    first, second = lines(log)
    assert first["model"] == second["model"] == "t"
    assert first["sampling"]["temperature"] == 0.5
    assert first["sampling"]["seed"] != second["sampling"]["seed"]
    assert len(first["output_token_ids"]) == 5
    assert first["output"]


def test_a_server_without_a_log_ignores_the_header() -> None:
    with serving(fake_engine.local_engine()) as served:
        body = {"prompt": "the quick", "max_tokens": 2, "model": "fake"}
        assert httpx.post(f"{served.url}/v1/completions", json=body, headers={HEADER: "1"}, timeout=60).is_success
