"""A cluster with the shipped config, and the answers expected of it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from slipstream import LLM, SamplingParams
from tests.support.distributed.deployments import DEPLOY, load
from tests.support.distributed.ray_requests import LENGTH, PROMPTS
from tests.support.distributed.ray_serving import PATIENCE_S, Cluster, cluster, head_line, on_ports_of


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
    """The demo pair's answer to each prompt, in one process and without Ray."""
    params = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    with LLM(enforce_eager=True, num_gpu_blocks_override=1024, speculative_config=None) as llm:
        results = llm.generate(PROMPTS, params, use_tqdm=False)
    return {prompt: result.outputs[0].text for prompt, result in zip(PROMPTS, results, strict=True)}


@pytest.fixture(scope="module")
def client(served: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made
