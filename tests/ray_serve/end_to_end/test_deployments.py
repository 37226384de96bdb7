"""Other deployments: a worker group, tool calls, API keys, `serve run`, the nodes of `cluster.yaml`."""

import json
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from tests.support.distributed.deployments import CLUSTER, DEPLOY, load
from tests.support.distributed.ray_requests import PROMPTS, asked, channel, completed, refusal, took
from tests.support.distributed.ray_serving import BIN, PATIENCE_S, Cluster, Stream, cluster, members, on_ports_of, until
from tests.support.models import tiny_models, tiny_pairs
from tests.support.policies import always
from tests.support.processes import is_running
from tests.support.serving import fake_engine
from tests.support.serving.anthropic_answers import client_of
from tests.support.serving.anthropic_structured_checks import MESSAGES
from tests.support.serving.openai_responses import RESPONSES
from tests.support.serving.openai_structured_checks import STRUCTURED

pytestmark = [pytest.mark.full, pytest.mark.timeout(0)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")


def group_config(made: Cluster, pair: tuple[Path, Path]) -> dict[str, Any]:
    """Return a config of one replica: two target ranks and a draft, each in its own bundle."""
    draft = {"model": str(pair[1]), "num_speculative_tokens": 3, "placement": "dedicated"}
    return one_replica(
        made,
        model=str(pair[0]),
        served_model_name="tiny",
        dtype="float32",
        tensor_parallel_size=2,
        speculative_config=always(draft),
    )


def worker_pids(made: Cluster, who: str) -> list[int]:
    """Return the process ids of the actors that hold the group's workers of one kind; Ray titles them so."""
    return [pid for node in made.node_pids for pid in members(node) if who in title(pid)]


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_a_replica_rebuilds_its_worker_group_and_is_kept(served: Cluster, pair: tuple[Path, Path]) -> None:
    served.deploy(group_config(served, pair))
    (before,) = served.replicas().items()
    whole = completed(served.url, "once upon a time", model="tiny", max_tokens=200)["choices"][0]["text"]
    workers = worker_pids(served, "WorkerActor.run")  # without the spare, which waits
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
    until(lambda: len(worker_pids(served, "WorkerActor.run")) == 3, "a worker group that is whole again")
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
    """Return the shipped config with one replica and *arguments*."""
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
            speculative_config=always(guesses),
            tool_call_parser="hermes",
            enable_auto_tool_choice=True,
        )
    )
    for check in (*STRUCTURED, *RESPONSES):
        check(client, "tiny")
    with client_of(served.url, timeout=PATIENCE_S) as other:
        for each in MESSAGES:
            each(other, "tiny")


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
    """Start head and worker as `ray up` would, with a token, both on this machine."""
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
                made.deploy(shipped)  # the token is required
            made.environment["RAY_AUTH_MODE"] = "token"
            made.environment["RAY_AUTH_TOKEN"] = token.read_text()
            made.deploy(shipped)
            assert completed(made.url, PROMPTS[0], max_tokens=4)["usage"]["completion_tokens"] == 4
            assert len(made.replicas()) == 2
            replicas = list(made.replicas().values())
        assert not any(map(is_running, replicas))


def on_ports(commands: list[str], made: Cluster) -> str:
    """Return the `ray start` line of *commands* on this cluster's own ports; what would end other Rays is left out."""
    (line,) = (command for command in commands if command != "ray stop")
    words = [
        word
        for word in shlex.split(line.replace("bash /opt/slipstream/cluster/deploy/start_once.sh ", ""))
        if not word.startswith(("--autoscaling-config", "--metrics-export-port", "--ray-client-server-port"))
    ]
    text = " ".join(words)
    assert "6379" in text
    return text.replace("6379", str(made.port)).replace("8265", str(made.dashboard))
