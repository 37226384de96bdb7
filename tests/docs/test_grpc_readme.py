"""The ten-line client that the README shows."""

import contextlib
import io
from pathlib import Path

from protos.config.engine import SpeculativeConfig
from tests.support.serving.fake_engine import expected, local_engine
from tests.support.serving.grpc_server import serving

README = Path(__file__).parents[2] / "README.md"
CLIENT = """\
import grpc
from protos import slipstream_v1_pb2 as pb, slipstream_v1_pb2_grpc as stubs

with grpc.insecure_channel("localhost:9000") as channel:
    service = stubs.GenerationServiceStub(channel)
    sampling = pb.SamplingParams(max_tokens=64, temperature=0)
    for response in service.Generate(pb.GenerateRequest(text="def fibonacci(n):", sampling=sampling), timeout=60):
        print(response.chunk.text, end="", flush=True)
    usage = response.complete.usage
    print(f"\\n{usage.spec_accepted_tokens} of {usage.spec_draft_tokens} guesses accepted")
"""


def test_the_client_runs_as_it_stands() -> None:
    drafts = SpeculativeConfig(method="draft_model", num_speculative_tokens=4, model="none")
    with serving(local_engine(speculative=drafts)) as served, contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(CLIENT.replace("localhost:9000", served.address), "client", "exec"), {})
    text, told = printed.getvalue().splitlines()
    assert text == expected("def fibonacci(n):", 64)
    accepted, _, proposed, *_ = told.split()
    assert 0 < int(accepted) < int(proposed)


def test_it_is_the_one_in_the_readme() -> None:
    """Holds the README to it, wherever it shows a client of gRPC."""
    shown = README.read_text()
    assert CLIENT in shown or "slipstream_v1_pb2" not in shown
    assert len(CLIENT.splitlines()) == 10
