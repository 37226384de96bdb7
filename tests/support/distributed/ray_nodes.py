"""Run by `tests.ray.test_nodes`: an engine on a Ray cluster of several nodes on this machine; prints the results.

    python tests/support/distributed/ray_nodes.py '{"what": "tokens", "model": ..., "draft": ..., ...}'

Runs in a separate process: a process joins one cluster only, and that of the other tests has one node.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from cluster.settings import engine_config
from protos.errors import SlipstreamError
from slipstream import LLM, SamplingParams
from tests.conftest import RAY_VARIABLES
from tests.support.policies import always

PROMPTS = [[3 + i, 7, 9, 11 + i] * (1 + i) for i in range(6)]
PARAMS = [SamplingParams(temperature=0.0 if i % 2 else 0.8, seed=i, max_tokens=40, ignore_eos=True) for i in range(6)]
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "num_gpu_blocks_override": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
}
REBUILD_S, PLACEMENT_S = 4.0, 60.0
NOTICED_S = 30.0
LONG = SamplingParams(temperature=0.8, seed=1, max_tokens=200, ignore_eos=True)
AFTER = 10
"""Tokens after which a test acts on a stream."""
STORE_BYTES = 80 * 2**20


def generated(llm: LLM) -> list[list[int]]:
    """Return the outputs of all prompts."""
    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, PARAMS, use_tqdm=False)]


class Nodes:
    """Start a head without resources, and nodes with the given numbers of CPUs."""

    def __init__(self, cpus: list[int]) -> None:
        os.environ.update(RAY_VARIABLES)
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(initialize_head=True, head_node_args=_size(0))
        self._nodes = [self._cluster.add_node(**_size(count)) for count in cpus]
        self._cluster.wait_for_nodes()
        self.address = self._cluster.address

    def remove(self, beginning: str) -> None:
        """Kill the node whose id begins so, with everything on it."""
        node = next(node for node in self._nodes if node.node_id.startswith(beginning))
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def shutdown(self) -> None:
        self._cluster.shutdown()


def _size(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "num_gpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}


class Told:
    """The engine's progress reports, and its placement."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def node_of(self, who: str) -> str:
        """Return the prefix of the id of the node that *who* was placed on."""
        line = next(line for line in self.lines if line.startswith("placed: "))
        for part in line.removeprefix("placed: ").split("; "):
            names, node = re.fullmatch(r"(.*) on node (\w+)", part).groups()  # type: ignore[union-attr]
            if who in names.split(", "):
                return str(node)
        raise LookupError(f"{who} is not in {line!r}")


@contextmanager
def engine(order: dict[str, Any], nodes: Nodes) -> Iterator[tuple[LLM, Told]]:
    os.environ["RAY_ADDRESS"] = nodes.address
    told = Told()
    speculative = {"model": order["draft"], "num_speculative_tokens": 3, "placement": "dedicated"}
    config = engine_config(
        {
            "model": order["model"],
            "speculative_config": always(speculative),
            "tensor_parallel_size": order["ranks"],
            "placement_strategy": order["strategy"],
            "rebuild_timeout_s": REBUILD_S,
            "placement_timeout_s": PLACEMENT_S,
            "distributed_executor_backend": "ray",
            **SMALL,
        }
    )
    with LLM.from_config(config, told.lines.append) as llm:
        yield llm, told


def tokens(order: dict[str, Any], nodes: Nodes) -> dict[str, Any]:
    """Print all placements and the engine's outputs."""
    with engine(order, nodes) as (llm, told):
        names = ["controller", *(f"target rank {rank}" for rank in range(order["ranks"])), "draft"]
        where = {name: told.node_of(name) for name in names}
        outputs, stats = generated(llm), llm.stats()
        return {"where": where, "outputs": outputs, "proposed": stats.proposed, "accepted": stats.accepted}


def lose(order: dict[str, Any], nodes: Nodes) -> dict[str, Any]:
    """Kill the node of `who` during a stream; print the stream's result, or how long after that it failed."""
    with engine(order, nodes) as (llm, told):
        gone_at = time.monotonic()

        def act() -> None:
            nonlocal gone_at
            nodes.remove(told.node_of(order["who"]))
            gone_at = time.monotonic()

        try:
            streamed = stream(llm, act)
            outputs = until_noticed(llm)
        except SlipstreamError as error:
            return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - gone_at}
        return {"streamed": streamed, "outputs": outputs, "changes": llm.stats().draft_changes}


def stream(llm: LLM, act: Callable[[], None]) -> list[int]:
    """Stream a long answer to the first prompt; act after a few tokens, while the engine goes on."""
    ids: list[int] = []
    for output in llm.stream({"prompt_token_ids": PROMPTS[0]}, LONG):
        before = len(ids)
        ids += output.token_ids
        if before < AFTER <= len(ids):
            act()
    return ids


def until_noticed(llm: LLM) -> list[list[int]]:
    """Repeat all prompts until the draft is known to be lost; return the last outputs."""
    deadline = time.monotonic() + NOTICED_S
    outputs = generated(llm)
    while not llm.stats().draft_changes.get("lost") and time.monotonic() < deadline:
        outputs = generated(llm)
    return outputs


def main() -> None:
    order = json.loads(sys.argv[1])
    nodes = Nodes(order["cpus"])
    try:
        answer = {"tokens": tokens, "lose": lose}[order["what"]](order, nodes)
    finally:
        nodes.shutdown()
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
