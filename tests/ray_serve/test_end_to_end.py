"""`serve run` and `serve deploy` of what is shipped, over HTTP and gRPC: replicas that die, nodes of `cluster.yaml`."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from slipstream import LLM, SamplingParams
from tests.support.distributed.deployments import CLUSTER, DEPLOY, load
from tests.support.distributed.ray_serving import (
    BIN,
    PATIENCE_S,
    Cluster,
    Stream,
    cluster,
    head_line,
    members,
    on_ports_of,
    until,
)
from tests.support.models import tiny_models, tiny_pairs
from tests.support.processes import is_running, wait_gone
from tests.support.serving import fake_engine
from tests.support.serving.openai_checks import CHECKS, STRUCTURED, Check, a_parsed_answer

pytestmark = [pytest.mark.full, pytest.mark.timeout(0)]

PROMPTS = [f"def number_{i}(values):\n" for i in range(16)]
LENGTH = 400
"""Long enough that all streams are in flight when something dies."""
SERVICE = "slipstream.v1.GenerationService"
NOTICED_S = 20.0
"""Proxies know of a replica's death within this."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as made:
        yield Path(made)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Cluster]:
    """The shipped demo config: two replicas of the demo pair."""
    with cluster(folder, RAY_AUTH_MODE="disabled") as made:
        made.start(head_line(made), num_cpus=8)
        made.deploy(on_ports_of(made, load(DEPLOY / "serve" / "config.yaml")))
        assert len(made.replicas()) == 2
        yield made


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    """What the demo pair says to each prompt, in one process and without Ray."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    with LLM(enforce_eager=True, num_gpu_blocks_override=1024, speculative_config=None) as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    return {prompt: result.outputs[0].text for prompt, result in zip(PROMPTS, results, strict=True)}


def asked(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True, **fields}


def completed(url: str, prompt: str, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=asked(prompt, **fields), timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@contextlib.contextmanager
def channel(made: Cluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(made.target) as opened:
        yield opened


def refusal(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value


# One answer.


def test_http_says_what_one_process_says(served: Cluster, wanted: dict[str, str]) -> None:
    answer = completed(served.url, PROMPTS[0])
    assert answer["choices"][0]["text"] == wanted[PROMPTS[0]]
    answered = httpx.get(f"{served.url}/v1/models", headers={"x-request-id": "mine"}, timeout=60)
    assert answered.json()["data"][0]["id"] == "demo"
    assert answered.headers.get_list("x-request-id") == ["mine"]  # once, though proxies write it, too
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200
    wrong = httpx.post(f"{served.url}/v1/completions", json={"prompt": "x", "tempreature": 1}, timeout=60)
    assert wrong.status_code == 400
    assert "did you mean 'temperature'" in wrong.json()["error"]["message"]


def test_grpc_says_the_same(served: Cluster, wanted: dict[str, str]) -> None:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    with channel(served) as opened:
        stub = stubs.GenerationServiceStub(opened)
        responses = list(stub.Generate(pb.GenerateRequest(text=PROMPTS[1], sampling=sampling), timeout=PATIENCE_S))
        ids = stub.Tokenize(pb.TokenizeRequest(text=PROMPTS[1]), timeout=60).token_ids
        assert stub.Detokenize(pb.DetokenizeRequest(token_ids=list(ids)), timeout=60).text == PROMPTS[1]
        assert stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60).model == "demo"
        assert stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).state == pb.SERVER_STATE_LIVE
    chunks = "".join(each.chunk.text for each in responses if each.WhichOneof("response") == "chunk")
    complete = [each.complete for each in responses if each.WhichOneof("response") == "complete"]
    assert chunks == complete[0].text == wanted[PROMPTS[1]]
    assert complete[0].usage.spec_draft_tokens > complete[0].usage.spec_accepted_tokens > 0


def test_grpc_refuses_in_a_line(served: Cluster) -> None:
    with channel(served) as opened:
        stub = stubs.GenerationServiceStub(opened)
        errors = [
            refusal(lambda: list(stub.Generate(pb.GenerateRequest(), timeout=60))),
            refusal(lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[10**6]), timeout=60)),
            refusal(lambda: stub.GetModelInfo(pb.GetModelInfoRequest(model="nobody"), timeout=60)),
        ]
    codes = [error.code() for error in errors]
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND]
    for error in errors:
        assert error.details()
        assert not any(word in error.details() for word in ("Traceback", "ray::", ".py", "\n"))


def test_grpc_tells_its_health_and_its_services(served: Cluster) -> None:
    with channel(served) as opened:
        health = health_pb2_grpc.HealthStub(opened)
        for name in ("", SERVICE):
            assert health.Check(health_pb2.HealthCheckRequest(service=name), timeout=60).status == 1
        unknown = refusal(lambda: health.Check(health_pb2.HealthCheckRequest(service="x"), timeout=60))
        assert unknown.code() == grpc.StatusCode.NOT_FOUND
        asks = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo(iter([asks]), timeout=60)
        assert SERVICE in {service.name for service in next(answers).list_services_response.service}


def test_a_client_that_cancels_frees_its_places(served: Cluster) -> None:
    with channel(served) as opened:
        stub = stubs.GenerationServiceStub(opened)
        sampling = pb.SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
        call = stub.Generate(pb.GenerateRequest(text="x = ", sampling=sampling), timeout=PATIENCE_S)
        next(call)
        call.cancel()
        late = refusal(lambda: list(stub.Generate(pb.GenerateRequest(text="x = ", sampling=sampling), timeout=0.5)))
        assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED

        def idle() -> bool:
            infos = [stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60) for _ in range(8)]  # of both replicas
            return not any(info.num_requests_running + info.num_requests_waiting for info in infos)

        until(idle, "requests that nobody wants to be gone")


def test_requests_that_begin_alike_go_to_the_replica_that_knows_the_beginning(served: Cluster) -> None:
    beginning = "# a module of small helpers that everybody has in front\n" * 12
    for name in ("one", "two"):  # different beginnings may have different replicas
        counts = [completed(served.url, f"# {name}\n{beginning}def f_{i}():", max_tokens=2)["usage"] for i in range(8)]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in counts]
        assert cached[0] == 0
        assert all(cached[1:]), cached


# The real OpenAI client.


@pytest.fixture(scope="module")
def client(served: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


@pytest.mark.parametrize("check", [*CHECKS, a_parsed_answer], ids=lambda check: check.__name__)
def test_the_openai_client_is_content(client: openai.OpenAI, check: Check) -> None:
    check(client, "demo")


# Deaths.


def streamed(url: str, prompt: str, began: Callable[[], None]) -> Stream:
    """Stream an answer to its end, whatever that is."""
    seen = Stream()
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=asked(prompt, stream=True), timeout=PATIENCE_S) as got:
            if got.status_code != 200:
                seen.error = got.read().decode()
                return seen
            for line in got.iter_lines():
                if line.startswith("data: {"):
                    took(seen, json.loads(line.removeprefix("data: ")))
                    began()
    except httpx.TransportError as error:
        seen.error = type(error).__name__
    return seen


def took(seen: Stream, event: dict[str, Any]) -> None:
    if "error" in event:
        seen.error = event["error"]["code"]
    else:
        seen.text += event["choices"][0]["text"]
        seen.finish_reason = event["choices"][0]["finish_reason"] or seen.finish_reason


def streams_under(made: Cluster, act: Callable[[], None]) -> dict[str, Stream]:
    """Stream all prompts at once, and act when all have begun; return what they came to."""
    begun: set[str] = set()
    results: dict[str, Stream] = {}

    def one(prompt: str) -> None:
        results[prompt] = streamed(made.url, prompt, lambda: begun.add(prompt))

    threads = [threading.Thread(target=one, args=(prompt,)) for prompt in PROMPTS]
    for thread in threads:
        thread.start()
    until(lambda: len(begun) == len(PROMPTS), "streams that have begun")
    act()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(results) == len(PROMPTS)
    return results


class Watch:
    """Asks for the health again and again, and whether what it says is so: who is well, answers."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.said: list[tuple[float, int, int]] = []

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_S)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            at = time.monotonic()
            self.said.append((at, self._status("GET", "/health"), self._status("POST", "/v1/completions")))

    def _status(self, method: str, path: str) -> int:
        sent = asked("x", max_tokens=1) if method == "POST" else None
        try:
            return httpx.request(method, self._url + path, json=sent, timeout=PATIENCE_S).status_code
        except httpx.TransportError:
            return 0

    def since(self, moment: float) -> list[tuple[int, int]]:
        return [(health, answer) for at, health, answer in self.said if at > moment]


def test_a_replica_that_is_killed_takes_only_its_own_streams_and_returns(
    served: Cluster, wanted: dict[str, str]
) -> None:
    before = served.replicas()
    name, pid = next(iter(before.items()))
    family = [pid, *members(pid)]
    killed_at = 0.0

    def kill() -> None:
        nonlocal killed_at
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)

    with Watch(served.url) as watch:
        results = streams_under(served, kill)
        wait_gone(family, 30.0)  # what the replica had started is gone with it
        until(lambda: len(served.replicas()) == 2 and name not in served.replicas(), "another replica")
        returned_at = time.monotonic()
        until(lambda: len(watch.since(returned_at)) >= 3, "health after that")
    whole = {prompt: stream for prompt, stream in results.items() if stream.is_whole}
    assert 0 < len(whole) < len(PROMPTS), "both replicas had streams, and one of them went on"
    for prompt, stream in whole.items():
        assert stream.text == wanted[prompt]
    for prompt, stream in results.items():
        if prompt not in whole:
            assert stream.error is not None
            assert wanted[prompt].startswith(stream.text)
    assert set(before) - {name} <= set(served.replicas())
    assert {(health, answer) for at, health, answer in watch.said if at < killed_at - 5} <= {(200, 200)}
    # Until proxies have noticed, a request may still meet the dead one; from then on there is one that is well.
    assert all(status == (200, 200) for status in watch.since(killed_at + NOTICED_S)), watch.since(killed_at)
    seen = sorted({health for health, _ in watch.since(killed_at)})
    said = f"{len(whole)} of {len(PROMPTS)} streams went on; replaced after {returned_at - killed_at:.1f} s"
    print(f"{said}; /health said {seen} meanwhile")


def test_a_controller_that_is_killed_is_an_error_in_words_and_its_replica_is_replaced(served: Cluster) -> None:
    """The replica lives on and tells its clients; Serve sees it by the health check."""
    before = served.replicas()
    name, pid = next(iter(before.items()))
    engine = engine_of(pid)
    results = streams_under(served, lambda: os.kill(engine, signal.SIGKILL))
    errors = {stream.error for stream in results.values() if not stream.is_whole}
    assert errors == {"engine_dead"}
    assert any(stream.is_whole for stream in results.values())
    until(lambda: len(served.replicas()) == 2 and name not in served.replicas(), "another replica")
    wait_gone([pid], 60.0)


def engine_of(replica: int) -> int:
    """Return the process id of a replica's controller, which is its only child in Python."""
    found = [pid for pid in members(replica) if b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1
    return found[0]


# Deploying again, and ending.


def test_what_runs_ends_before_its_replica_does(served: Cluster, wanted: dict[str, str]) -> None:
    """A config that changes replaces replicas; streams that have begun are finished by those that began them."""
    config = on_ports_of(served, load(DEPLOY / "serve" / "config.yaml"))
    config["applications"][0]["args"]["max_num_seqs"] = 24
    before = set(served.replicas())
    results = streams_under(served, lambda: served.deploy(config))
    assert {prompt: stream.text for prompt, stream in results.items()} == wanted
    assert all(stream.is_whole for stream in results.values())
    assert before.isdisjoint(served.replicas())


def test_a_config_that_is_wrong_is_told_and_disturbs_nobody(served: Cluster) -> None:
    config = on_ports_of(served, load(DEPLOY / "serve" / "config.yaml"))
    config["applications"][0]["args"]["modle"] = "x"
    with pytest.raises(AssertionError, match="unknown argument 'modle', did you mean 'model'"):
        served.deploy(config)
    assert completed(served.url, "x", max_tokens=1)


# A gang in a replica.


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")


def gang_config(made: Cluster, pair: tuple[Path, Path]) -> dict[str, Any]:
    """Return a config of one replica: two target ranks and a draft, each in a bundle of its own."""
    draft = {"model": str(pair[1]), "num_speculative_tokens": 3, "placement": "dedicated"}
    return one_replica(
        made,
        model=str(pair[0]),
        served_model_name="tiny",
        dtype="float32",
        tensor_parallel_size=2,
        speculative_config=draft,
    )


def worker_pids(made: Cluster, who: str) -> list[int]:
    """Return the process ids of the actors that hold the group's workers of one kind; Ray titles them so."""
    return [pid for node in made.node_pids for pid in members(node) if who in title(pid)]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_replica_rebuilds_its_gang_and_is_kept(served: Cluster, pair: tuple[Path, Path]) -> None:
    served.deploy(gang_config(served, pair))
    (before,) = served.replicas().items()
    whole = completed(served.url, "once upon a time", model="tiny", max_tokens=200)["choices"][0]["text"]
    workers = worker_pids(served, "WorkerActor")
    assert len(workers) == 3
    begun = threading.Event()
    results: list[Stream] = []
    fields = {"model": "tiny", "max_tokens": 200}

    def one() -> None:
        results.append(streamed_with(served.url, "once upon a time", begun.set, **fields))

    thread = threading.Thread(target=one)
    thread.start()
    assert begun.wait(PATIENCE_S)
    os.kill(workers[0], signal.SIGKILL)
    thread.join(PATIENCE_S)
    assert results[0].text == whole
    assert results[0].is_whole
    until(lambda: len(worker_pids(served, "WorkerActor")) == 3, "a gang that is whole again")
    time.sleep(15)  # five health checks: Serve would have replaced it
    assert dict([before]) == served.replicas()


def streamed_with(url: str, prompt: str, began: Callable[[], None], **fields: Any) -> Stream:
    seen = Stream()
    sent = asked(prompt, stream=True, **fields)
    with httpx.stream("POST", f"{url}/v1/completions", json=sent, timeout=PATIENCE_S) as got:
        for line in got.iter_lines():
            if line.startswith("data: {"):
                took(seen, json.loads(line.removeprefix("data: ")))
                began()
    return seen


# A model that calls tools; keys, and too many requests.


def one_replica(made: Cluster, **arguments: Any) -> dict[str, Any]:
    """Return the shipped config with one replica of its own arguments."""
    config = on_ports_of(made, load(DEPLOY / "serve" / "config.yaml"))
    (application,) = config["applications"]
    deployments = [{**application["deployments"][0], "num_replicas": 1}]
    args = {"device": "cpu", "enforce_eager": True, "num_gpu_blocks_override": 400, **arguments}
    return {**config, "applications": [{**application, "args": args, "deployments": deployments}]}


def test_answers_of_a_form_and_calls(served: Cluster, client: openai.OpenAI, tmp_path: Path) -> None:
    vocab_size = fake_engine.bare_tokenizer().get_vocab_size()
    tiny_models.build(
        "llama",
        tmp_path,
        vocab_size=vocab_size,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        max_position_embeddings=2048,
    )
    fake_engine.tokenizer().save_pretrained(tmp_path)
    guesses = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    served.deploy(
        one_replica(
            served,
            model=str(tmp_path),
            served_model_name="tiny",
            max_model_len=1536,
            max_num_seqs=8,
            speculative_config=guesses,
            tool_call_parser="hermes",
            enable_auto_tool_choice=True,
        )
    )
    for check in STRUCTURED:
        check(client, "tiny")


def test_keys_are_asked_for_and_too_much_is_refused_at_once(served: Cluster) -> None:
    config = one_replica(served, max_num_seqs=1, max_waiting_requests=1)
    config["applications"][0]["runtime_env"] = {"env_vars": {"SLIPSTREAM_API_KEY": "one-key"}}
    served.deploy(config)
    assert httpx.get(f"{served.url}/health", timeout=60).status_code == 200
    for path in ("/v1/models", "/metrics", "/v1/nothing"):
        assert httpx.get(served.url + path, timeout=60).status_code == 401, path
    with channel(served) as opened:
        stub = stubs.GenerationServiceStub(opened)
        nobody = refusal(lambda: stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60))
        assert nobody.code() == grpc.StatusCode.UNAUTHENTICATED
        known = stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=60, metadata=(("authorization", "Bearer one-key"),))
        assert known.model == "demo"
        assert health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=60).status == 1

    def answers(max_retries: int) -> list[object]:
        with (
            openai.OpenAI(
                base_url=f"{served.url}/v1", api_key="one-key", max_retries=max_retries, timeout=PATIENCE_S
            ) as made,
            ThreadPoolExecutor(8) as pool,
        ):
            return list(pool.map(lambda number: outcome(made, f"x_{number} = "), range(8)))

    refused = [error for error in answers(0) if isinstance(error, openai.RateLimitError)]
    assert refused
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert all(isinstance(answer, str) for answer in answers(50))


def outcome(client: openai.OpenAI, prompt: str) -> object:
    """Return an answer's text, or the error in its place."""
    asks = {"ignore_eos": True}
    try:
        return client.completions.create(model="demo", prompt=prompt, max_tokens=60, extra_body=asks).choices[0].text
    except openai.APIStatusError as error:
        return error


# Other ways in.


def test_serve_run_serves_until_it_is_told_to_stop(served: Cluster) -> None:
    """On a cluster where nothing else is served: `serve run` starts proxies on Ray's own ports, so elsewhere."""
    shut = served.serve("shutdown", "-y", "-a", served.dashboard_url)
    assert shut.returncode == 0, shut.stderr
    command = [  # a shell may have had us ignore SIGINT, and what we start with us
        "env", "--default-signal=INT", BIN / "serve", "run", "cluster.serve:build_app", "device=cpu",
        "enforce_eager=true", "max_num_seqs=8", "num_gpu_blocks_override=256", "--route-prefix", "/",
    ]  # fmt: skip
    environment = {**served.environment, "RAY_ADDRESS": served.address}
    with subprocess.Popen(command, env=environment) as process:
        try:
            until(lambda: bool(served.replicas()) or process.poll() is not None, "a replica")
            served.wait_running()
            answer = completed("http://127.0.0.1:8000", PROMPTS[0], max_tokens=4)
            assert answer["usage"]["completion_tokens"] == 4
            process.send_signal(signal.SIGINT)
            process.wait(120)
        finally:
            process.kill()
    until(lambda: not served.replicas(), "replicas to be gone")


def test_the_lines_of_cluster_yaml_make_nodes_that_serve() -> None:
    """Head and worker as `ray up` would start them, with a token, beside each other on this machine."""
    config = load(CLUSTER / "cluster.yaml")
    with tempfile.TemporaryDirectory(prefix="rs-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text("a" * 64)
        with cluster(Path(folder), RAY_AUTH_TOKEN_PATH=str(token), RAY_HEAD_IP="127.0.0.1") as made:
            made.environment.pop("RAY_AUTH_MODE", None)
            made.start(on_ports(config["head_start_ray_commands"], made), num_cpus=0)
            made.start(on_ports(config["worker_start_ray_commands"], made), num_cpus=4)
            shipped = on_ports_of(made, load(DEPLOY / "serve" / "config.yaml"))
            made.environment["RAY_AUTH_MODE"] = "disabled"
            with pytest.raises(AssertionError):
                made.deploy(shipped)  # the token is asked for
            made.environment["RAY_AUTH_MODE"] = "token"
            made.environment["RAY_AUTH_TOKEN"] = token.read_text()
            made.deploy(shipped)
            assert completed(made.url, PROMPTS[0], max_tokens=4)["usage"]["completion_tokens"] == 4
            assert len(made.replicas()) == 2
            replicas = list(made.replicas().values())
        assert not any(map(is_running, replicas))


def on_ports(commands: list[str], made: Cluster) -> str:
    """Return the `ray start` line of *commands* on this cluster's own ports; what would end other Rays is left out."""
    assert commands[0] == "ray stop"
    (line,) = commands[1:]
    words = [
        word
        for word in shlex.split(line)
        if not word.startswith(("--autoscaling-config", "--metrics-export-port", "--ray-client-server-port"))
    ]
    text = " ".join(words)
    assert "6379" in text
    return text.replace("6379", str(made.port)).replace("8265", str(made.dashboard))
