"""`slipstream bench serve`: its requests, arrival times and metrics, and a run against a small server."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.bench import report as bench_report
from cluster.bench.client import BenchTarget, RequestTiming
from cluster.bench.datasets import BenchPrompt, DatasetOptions, load
from cluster.bench.load import AcceptanceCounts, LoadRun, Traffic, read_acceptance
from cluster.bench.load import run as run_load
from cluster.cli import bench as cli_bench
from protos.errors import ConfigError
from protos.stats import EngineStats
from runtime.metrics.prometheus import Metrics
from tests.support.serving.fake_server import served


def test_made_up_prompts_depend_on_the_seed_alone() -> None:
    first, again, other = (
        load(DatasetOptions(num_prompts=5, input_len=7, output_len=3, seed=seed)) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert {(len(str(prompt.content).split()), prompt.max_tokens) for prompt in first} == {(7, 3)}
    assert len({str(prompt.content) for prompt in first}) == 5, "a prefix cache must not answer"


def test_files_are_read_by_their_suffix(tmp_path: Path) -> None:
    talk = tmp_path / "talk.json"
    turns = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because " * 10}]
    talk.write_text(
        json.dumps([{"conversations": turns}, {"conversations": turns[:1]}, {"conversations": []}]), encoding="utf-8"
    )
    assert load(DatasetOptions(str(talk), num_prompts=2)) == [BenchPrompt("why?", 20)] * 2
    lines = tmp_path / "lines.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "a", "output_tokens": 9}, {"messages": [{"role": "user", "content": "b"}]}]
    lines.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    found = load(DatasetOptions("custom", lines, num_prompts=3))
    assert len(found) == 3
    assert {str(prompt.content): prompt.max_tokens for prompt in found} == {"a": 9, str(rows[1]["messages"]): 256}
    assert {prompt.max_tokens for prompt in load(DatasetOptions(str(lines), num_prompts=2, output_len=4))} == {4}


@pytest.mark.parametrize("first", [("system", "Be brief."), ("gpt", "An earlier answer.")])
def test_only_what_a_user_asks_is_sent(tmp_path: Path, first: tuple[str, str]) -> None:
    path = tmp_path / "talk.json"
    said = [first, ("human", "why?"), ("gpt", "because " * 10)]
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    assert load(DatasetOptions(str(path), num_prompts=1)) == [BenchPrompt("why?", 20)]


def test_lines_may_be_texts_and_hold_what_ends_lines_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    rows = ["a\u2028b", {"prompt": "c\u0085d", "output_tokens": None}]
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n  \n" for row in rows)
    path.write_text(text, encoding="utf-8-sig")
    found = load(DatasetOptions(str(path), num_prompts=2))
    assert {prompt.content for prompt in found} == {"a\u2028b", "c\u0085d"}
    assert {prompt.max_tokens for prompt in found} == {256}


def test_messages_are_sent_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}]}
    messages = [parts, {"role": "assistant", "content": None, "tool_calls": [call]}]
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": [], "prompt": "b"}))
    found = load(DatasetOptions(str(path), num_prompts=2))
    assert sorted((prompt.content for prompt in found), key=str) == sorted([messages, "b"], key=str)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": None}, ":1 has none of the fields 'conversations', 'messages', 'prompt', but conversations"),
        ({"conversations": 5}, ":1: conversations must be a list, got 5"),
        ({"messages": [1, 2]}, ":1: messages must be a list of objects with a role, got "),
        ({"messages": [], "prompt": ""}, ":1: messages must not be empty"),
        ({"prompt": 3}, ":1: prompt must be text, got 3"),
        ({"prompt": "a", "output_tokens": -5}, ":1: output_tokens must be a whole number of at least 1, got -5"),
        ({"prompt": "a", "output_tokens": True}, ":1: output_tokens must be a whole number of at least 1, got True"),
        (7, ":1 must be text or a JSON object, got 7"),
    ],
)
def test_rows_that_cannot_be_used_are_named(tmp_path: Path, row: Any, words: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ConfigError, match=words):
        load(DatasetOptions(str(path)))


def test_the_shipped_workload_is_one_too() -> None:
    prompts = load(DatasetOptions("workload", num_prompts=8))
    assert all(prompt.content and prompt.max_tokens > 1 for prompt in prompts)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.txt", "", "one of random"),
        ("gone.json", None, "needs a file"),
        ("bad.json", "{", "cannot read .*bad.json"),
        ("odd.json", "3", "must hold a list"),
        ("empty.jsonl", "", "no request"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        load(DatasetOptions(str(path)))


def test_arrivals_have_the_rate_and_the_evenness_asked_for() -> None:
    assert Traffic().delays(3) == [0.0] * 3
    poisson, even = (np.array(Traffic(4.0, burstiness, seed=1).delays(4000)) for burstiness in (1.0, 25.0))
    assert poisson.mean() == pytest.approx(0.25, rel=0.06)
    assert poisson.std() == pytest.approx(0.25, rel=0.1)
    assert even.std() == pytest.approx(0.05, rel=0.1)
    assert Traffic(4.0, seed=1).delays(9) == Traffic(4.0, seed=1).delays(9) != Traffic(4.0, seed=2).delays(9)
    with pytest.raises(ConfigError, match="request_rate must be more than 0"):
        Traffic(0.0)


def test_bodies_fit_the_endpoint() -> None:
    target = BenchTarget("http://x", "/v1/chat/completions", "m", "key", {"temperature": 0.5})
    body = target.body(BenchPrompt("hi", 5))
    assert body["messages"] == [{"role": "user", "content": "hi"}]
    assert (body["model"], body["max_tokens"], body["temperature"], body["stream"]) == ("m", 5, 0.5, True)
    assert target.headers == {"authorization": "Bearer key"}
    assert BenchTarget("http://x", "/v1/completions", "m").body(BenchPrompt("hi", 5))["prompt"] == "hi"


def measured(first_s: float, gaps: Sequence[float], tokens: int) -> RequestTiming:
    return RequestTiming(0.0, first_s, first_s + sum(gaps), list(gaps), 1 + len(gaps), 10, tokens)


def test_figures_are_what_numpy_makes_of_the_same_times() -> None:
    rng = np.random.default_rng(0)
    requests = [measured(rng.uniform(0.1, 1), rng.uniform(0.01, 0.1, 9), 19) for _ in range(30)]
    failed = RequestTiming(0.0, error="429: try later")
    found = bench_report.metrics(LoadRun([*requests, failed], 5.0, None))
    assert (found["completed"], found["failed"], found["errors"]) == (30, 1, ["429: try later"])
    assert found["output_throughput"] == 30 * 19 / 5.0
    first_ms = [1000 * one.first_s for one in requests if one.first_s is not None]
    gaps_ms = [1000 * gap for one in requests for gap in one.gaps]
    per_token_ms = [1000 * sum(one.gaps) / 18 for one in requests]
    for name, values in (("ttft", first_ms), ("itl", gaps_ms), ("tpot", per_token_ms)):
        assert found[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        for percent in (50, 90, 95, 99):
            assert found[f"p{percent}_{name}_ms"] == pytest.approx(np.percentile(values, percent))
    assert "spec_decode_acceptance_rate" not in found
    nothing = bench_report.metrics(LoadRun([failed], 5.0, None))
    assert nothing["p99_ttft_ms"] is None
    assert len(bench_report.tables(nothing)) == 2


def test_acceptance_is_read_from_what_a_server_publishes() -> None:
    stats = EngineStats(drafting_rounds=10, proposed=40, accepted=25, accepted_per_pos=(10, 8, 5, 2))
    before = read_acceptance(Metrics("m", lambda: EngineStats(drafting_rounds=4, proposed=16)).render().decode())
    after = read_acceptance(Metrics("m", lambda: stats).render().decode())
    assert before == AcceptanceCounts(4, 16)
    assert after == AcceptanceCounts(10, 40, 25, {0: 10, 1: 8, 2: 5, 3: 2})
    found = bench_report.metrics(LoadRun([], 1.0, after.since(before)))
    assert found["spec_decode_acceptance_rate"] == 25 / 24
    assert found["spec_decode_acceptance_length"] == 1 + 25 / 6
    assert read_acceptance("process_cpu_seconds_total 1\n") is None


def bench(*args: str) -> None:
    with pytest.raises(SystemExit) as end:
        cli_bench.run(["serve", *args])
    assert end.value.code == 0


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    with served() as url:
        bench(
            "--base-url",
            url + "/",
            "--num-prompts",
            "6",
            "--random-input-len",
            "5",
            "--output-len",
            "9",
            "--max-concurrency",
            "3",
            "--request-rate",
            "500",
            "--seed",
            "3",
            "--ignore-eos",
            "--output",
            str(output),
        )
        said = capsys.readouterr().out
        bench(
            "--base-url",
            url,
            "--endpoint",
            "/v1/chat/completions",
            "--num-prompts",
            "1",
            "--output-len",
            "5",
            "--random-input-len",
            "3",
        )
        with pytest.raises(ConfigError, match="does not exist; served: fake"):
            bench("--base-url", url, "--model", "other", "--num-prompts", "1")
    found = json.loads(output.read_text(encoding="utf-8"))
    assert (found["model"], found["completed"], found["failed"], found["total_output_tokens"]) == ("fake", 6, 0, 54)
    assert found["total_input_tokens"] > 6 * 5
    assert 0 < found["p50_ttft_ms"] <= found["p99_ttft_ms"] <= found["p99_e2el_ms"]
    assert found["mean_itl_ms"] > found["mean_tpot_ms"] > 0, "a piece holds several tokens"
    # The fake engine accepts 2 of 4, 2 of 4, 1 of 2, and then has no room for draft tokens.
    assert found["spec_decode_acceptance_rate"] == 0.5
    assert found["spec_decode_num_drafts"] == 18
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, pytest.approx(2 / 3), 0.0, 0.0]
    for words in ("Time to first token", "Inter-token latency", "Output tokens/s", "50.0%"):
        assert words in said


def test_a_server_that_is_not_there_is_said_in_a_line() -> None:
    with pytest.raises(ConfigError, match="is the server up"):
        bench("--base-url", "http://127.0.0.1:9", "--num-prompts", "1")


HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"


async def asked_of(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], count: int
) -> LoadRun:
    """Run the benchmark against a server with these answers, three requests at a time."""
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        return await run_load(
            BenchTarget(address, "/v1/completions", "m"),
            [BenchPrompt("hi", 1)] * count,
            Traffic(max_concurrency=3),
            lambda measured: None,
        )


def saying(choice: bytes) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
    """Answer everything with one chunk."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + b'data: {"choices": [' + choice + b"]}\n\n")
        writer.close()

    return answer


def test_an_answer_may_be_empty_but_not_without_an_end() -> None:
    run = asyncio.run(asked_of(saying(b'{"text": "", "finish_reason": "stop"}'), 1))
    assert run.requests[0].error is None
    assert bench_report.metrics(run)["completed"] == 1
    with pytest.raises(ConfigError, match="the answer broke off"):
        asyncio.run(asked_of(saying(b'{"text": "x"}'), 1))


def test_no_more_requests_are_in_flight_than_wanted() -> None:
    most, now = 0, 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most, now
        await reader.readuntil(b"\r\n\r\n")
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        writer.write(HEAD + b'data: {"choices": [{"text": "x", "finish_reason": "length"}]}\n\n')
        writer.close()

    run = asyncio.run(asked_of(answer, 12))
    assert most == 3
    assert [one.error for one in run.requests] == [None] * 12
    assert {one.num_output_tokens for one in run.requests} == {1}, "chunks are counted if the server counts no tokens"
    assert run.acceptance is None
