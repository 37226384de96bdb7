"""Load over Ray Serve on three machines, of which one is cut off or loses its power every minute, and comes back.

    pytest -m full -s tests/ray/test_chaos.py --chaos-minutes 20 --chaos-seed 1

Answers in one piece are asked for. Each is whole and the same as that of one process, or it ends with an error that
clients may retry, before the first token. Streams cannot be had so: one whose replica is lost breaks off.
"""

import json
import random
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream import LLM, SamplingParams
from tests.support.distributed.deployments import SERVE_CONFIGS, load
from tests.support.distributed.machine_faults import PATIENCE_S, RayMachines, ray_machines
from tests.support.distributed.machines import Machine, missing
from tests.support.processes import wait_until

LACKING = missing()
pytestmark = [pytest.mark.full, pytest.mark.timeout(0), pytest.mark.skipif(bool(LACKING), reason=LACKING)]
ENGINE = {
    "device": "cpu",
    "dtype": "float32",
    "enforce_eager": True,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 256,
    "generation_config": "vllm",  # no sampling defaults of the checkpoint, which `LLM` does not add to given parameters
}
PROMPTS = ["def fibonacci(n):", "import os\n", "class Stack:\n", "def read_lines(path):", "for i in range(10):\n"]
ASKED = [
    {"prompt": prompt, "max_tokens": 32, "temperature": 0.0 if i % 2 else 0.8, "seed": i}
    for i, prompt in enumerate(PROMPTS)
]
CLIENTS = 3
EVERY_S = 60.0
CUTS_S = (1.0, 4.0, 15.0)
OFF_S = (5.0, 20.0)
REPLICA_CPUS = 2
"""Each machine has room for one replica."""


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    params = [SamplingParams(**{name: value for name, value in asked.items() if name != "prompt"}) for asked in ASKED]
    with LLM(speculative_config=None, **ENGINE) as llm:
        return [result.outputs[0].text for result in llm.generate(PROMPTS, params, use_tqdm=False)]


def config_in(folder: Path) -> Path:
    """Write the shipped Serve configuration, but for the engine's arguments, and the time to drain."""
    (shipped,) = [path for path in SERVE_CONFIGS if path.name == "config.yaml"]
    config = load(shipped)
    config["applications"][0]["args"] = {**ENGINE, "drain_timeout_s": 10}
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def answers_from(machine: Machine, address: str) -> bool:
    url = f"http://{address}:8000/v1/completions"
    request = f"import httpx; httpx.post({url!r}, json={ASKED[0]!r}, timeout=30).raise_for_status()"
    return machine.run("python", "-c", request, timeout=PATIENCE_S).returncode == 0


def disturb(cluster: RayMachines, chosen: random.Random) -> str:
    """Cut a machine off, or let it lose its power, and bring it back; return what was done."""
    node = chosen.choice(cluster.others)
    if chosen.random() < 0.5:
        seconds = chosen.choice(CUTS_S)
        node.cut()
        time.sleep(seconds)
        node.join()
        return f"{node.name} cut off for {seconds:.0f} s"
    node.lose_power()
    seconds = chosen.uniform(*OFF_S)
    time.sleep(seconds)
    node.join()
    cluster.start(node, cpus=REPLICA_CPUS)
    return f"{node.name} without power for {seconds:.0f} s"


def count(answers: list[dict[str, Any]], undisturbed: list[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for answer in answers:
        whole = "equal" if answer.get("text") == undisturbed[answer["prompt"]] else "different"
        counts[answer.get("error", whole)] += 1
    return counts


def differing(answers: list[dict[str, Any]], undisturbed: list[str]) -> list[tuple[str, str]]:
    """Return the first answers that differ, each with the undisturbed one."""
    pairs = [(answer["text"], undisturbed[answer["prompt"]]) for answer in answers if "text" in answer]
    return [pair for pair in pairs if pair[0] != pair[1]][:3]


def is_retryable(what: str) -> bool:
    """Whether clients retry after this: no answer, or a status that says that the server is at fault."""
    return not what[:3].isdigit() or what.startswith(("429", "5"))


def test_faults_every_minute(short_dir: Path, undisturbed: list[str], request: pytest.FixtureRequest) -> None:
    minutes, seed = request.config.getoption("chaos_minutes"), request.config.getoption("chaos_seed")
    chosen = random.Random(seed)
    print(f"--chaos-minutes {minutes} --chaos-seed {seed}")
    with ray_machines(short_dir, "one", "two", "three") as cluster:
        head = cluster.head
        cluster.start_head(cpus=0)
        cluster.start_others(cpus=REPLICA_CPUS)
        with (short_dir / "serve.log").open("wb") as log:
            serve = head.start("serve", "run", config_in(short_dir), stdout=log, stderr=subprocess.STDOUT)
        ready_s = wait_until(lambda: answers_from(head, head.address), PATIENCE_S, short_dir / "serve.log")
        print(f"ready: {ready_s:.0f} s", flush=True)

        addresses = [node.address for node in (head, *cluster.others)]
        (short_dir / "order").write_text(json.dumps({"clients": CLIENTS, "asked": ASKED, "addresses": addresses}))
        clients = head.start("python", "-m", "tests.support.distributed.chaos_load", short_dir / "order")
        began = time.monotonic()
        while time.monotonic() - began < 60 * minutes - EVERY_S / 2:
            at = time.monotonic()
            print(f"{at - began:.0f} s: {disturb(cluster, chosen)}", flush=True)
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - at)))
        back_s = wait_until(lambda: answers_from(head, head.address), PATIENCE_S, "served again")
        (short_dir / "stop").touch()
        assert clients.wait(PATIENCE_S) == 0
        answers = json.loads((short_dir / "answers").read_text())
        counts = count(answers, undisturbed)
        longest_s = max(answer["ended"] - answer["began"] for answer in answers if "text" in answer)
        print(f"{len(answers)} requests in {time.monotonic() - began:.0f} s: {dict(counts)}")
        print(f"slowest whole answer: {longest_s:.1f} s; served again {back_s:.0f} s after the last minute")
        assert not counts["different"], differing(answers, undisturbed)
        assert counts["equal"] > 0
        assert all(is_retryable(what) for what in counts if what != "equal"), counts
        for node in (*cluster.others, head):
            node.run("ray", "stop", "--force", timeout=PATIENCE_S)
        serve.kill()
        serve.wait()
        wait_until(lambda: not any(node.processes() for node in (head, *cluster.others)), PATIENCE_S, "empty machines")
