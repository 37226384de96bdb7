"""`serve deploy` of the shipped config: requests over HTTP and gRPC."""

from pathlib import Path

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import slipstream_v1_pb2 as pb
from protos import slipstream_v1_pb2_grpc as stubs
from tests.support.distributed.ray_requests import LENGTH, PROMPTS, channel, completed, refusal
from tests.support.distributed.ray_serving import PATIENCE_S, Cluster, until
from tests.support.serving.openai_answers import Check
from tests.support.serving.openai_checks import CHECKS
from tests.support.serving.openai_structured_checks import a_parsed_answer

pytestmark = [pytest.mark.full, pytest.mark.timeout(0)]
SERVICE = "slipstream.v1.GenerationService"


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


def test_grpc_refuses_in_a_line(served: Cluster, folder: Path) -> None:
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
    logs = folder / "session_latest/logs"
    written = "".join(path.read_text() for path in (*logs.glob("worker-*.err"), *logs.glob("serve/*.log")))
    assert "POST" in written or "CALL" in written, "Serve's access log"
    assert "gRPCStatusError" not in written, "a traceback for every call that is refused"


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


@pytest.mark.parametrize("check", [*CHECKS, a_parsed_answer], ids=lambda check: check.__name__)
def test_the_openai_client_is_content(client: openai.OpenAI, check: Check) -> None:
    check(client, "demo")
