"""The costs of an engine's steps, from the table that it measures for its policy."""

import platform
import time
from statistics import median

from benchmarks.fleet.costs import ReplicaCosts
from benchmarks.shared import workload
from cluster import assemble
from cluster.settings import engine_config
from demo import pair
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox

TOKENS = 64
"""Of each answer."""


def measured_costs(k: int, max_seqs: int) -> ReplicaCosts:
    """Return what steps of the demo pair cost here, eager, in fp32 and with one thread; the prompts are the demo's."""
    target, draft = pair()
    arguments = {
        "model": str(target),
        "speculative_config": {"model": str(draft), "num_speculative_tokens": k, "placement": "colocated"},
        "device": "cpu",
        "dtype": "float32",
        "enforce_eager": True,
        "num_threads": 1,
        "max_num_seqs": max_seqs,
        "num_gpu_blocks_override": 1024,
    }
    inbox = LocalInbox()
    built = assemble.build(engine_config(arguments), inbox, report=lambda line: None)
    table = built.info.costs
    assert table is not None, "the policy `adaptive` needs them"
    prompts = [item.prompt for item in workload.load(target).single]
    params, greedy = SamplingParams(ignore_eos=True), Sampling(0, 0.0)
    inbox.put([Request(str(i), prompt, params, greedy, TOKENS) for i, prompt in enumerate(prompts)])
    overheads: list[float] = []
    while built.controller.scheduler.num_unfinished or not overheads:
        began, before = time.perf_counter(), built.controller.stats().phases
        built.controller.step()
        took, after = time.perf_counter() - began, built.controller.stats().phases
        overheads.append(took - (after.propose_s + after.score_s - before.propose_s - before.score_s))
    stats = built.controller.stats()
    built.shutdown()
    first = stats.accepted_per_pos[0] / max(1, stats.drafting_rounds)
    return ReplicaCosts(dict(table.target_s), dict(table.draft_s), median(overheads), 0.0, first, platform.machine())
