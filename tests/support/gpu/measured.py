"""Prints what a step asks of a GPU, by pretending: `python -m tests.support.gpu.measured WHAT [CASE ...]`.

A Llama of 32 layers as target, one of 16 as draft, tiny widths; and heads for that target. WHAT: "before" runs eager,
"kernels" too, but with Triton's kernels (set TRITON_INTERPRET=1), "after" with graphs. Cases are those whose name has
one of the words given. Those "on 2 ranks" have a draft in a process of its own, and show both target ranks. No round is
launched ahead, so that each has its own launches only.
"""

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protos.messages import Request, Sampling
from slipstream import SamplingParams
from tests.support.distributed.engine import Models, configure, quick_turns, threaded
from tests.support.gpu.engine import llamas, only, serve
from tests.support.gpu.machine import interpreted_kernels, pretended_gpu
from tests.support.gpu.worker_group import pretended_workers
from tests.support.models import synthetic
from workers.gpu.sizes import SamplerKind

LIMITS: dict[str, tuple[SamplerKind, dict[str, Any]]] = {
    "greedy": ("greedy", {"temperature": 0.0}),
    "drawn": ("drawn", {"temperature": 1.0}),
    "top-p": ("limited", {"temperature": 1.0, "top_p": 0.9}),
}
CHAIN = {"num_speculative_tokens": 4}
TREE = {"num_speculative_tokens": 8, "eagle_topk": 4, "num_steps": 4}
STATIC = {"num_speculative_tokens": 8}
TOKENS = 10


def cases(target: Path, draft: Path) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Yield what is measured: a name, sampling, and speculation."""
    for kind in LIMITS:
        yield f"plain, {kind}", kind, None
    for kind in LIMITS:
        yield f"chain of 4, {kind}", kind, {"method": "draft_model", "model": str(draft), **CHAIN}
    for kind in LIMITS:
        yield f"tree of 8, {kind}", kind, {"method": "draft_model", "model": str(draft), **TREE}
    medusa, recurrent = synthetic.medusa(target), synthetic.recurrent(target)
    for name, made, shape in (("Medusa's tree", medusa, STATIC), ("ReDrafter's beams", recurrent, TREE)):
        folder = made.write(draft.parent / made.method)
        for kind in LIMITS:
            yield f"{name} of 8, {kind}", kind, {"method": made.method, "model": str(folder), **shape}


def main(wanted: str, words: list[str]) -> None:
    """Print a line for each case and batch."""
    with tempfile.TemporaryDirectory() as folder:
        target, draft = llamas(Path(folder), 32, 16)
        for name, kind, speculative in cases(target, draft):
            chosen = [batch for batch in (1, 8) if any(word in f"{name}, batch {batch}" for word in words or [""])]
            for batch in chosen:
                print(f"{name}, batch {batch}: {measure(target, batch, kind, speculative, wanted)}", flush=True)
        for name, shape in (("plain", None), ("chain of 4", CHAIN), ("tree of 8", TREE)):
            for batch in (1, 8):
                title = f"{name} on 2 ranks, greedy, batch {batch}"
                if any(word in title for word in words or [""]):
                    print(f"{title}: {measure_ranks((target, draft), batch, shape, wanted)}", flush=True)


def measure(target: Path, batch: int, kind: str, speculative: dict[str, Any] | None, wanted: str) -> dict[str, int]:
    """Return the totals of the round with all draft tokens that launched most: kernels, or else graphs."""
    sampler, limits = LIMITS[kind]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1, **limits)
    prompts = [[3 + i, 5, 9, 11 + i] for i in range(batch)]
    k = 0 if speculative is None else int(speculative["num_speculative_tokens"])
    with contextlib.ExitStack() as stack:
        machine = stack.enter_context(pretended_gpu())
        stack.enter_context(only(batch, sampler))
        if wanted == "kernels":
            stack.enter_context(interpreted_kernels())
        served = serve(
            machine,
            target,
            prompts,
            params,
            max_num_seqs=batch,
            enforce_eager=wanted != "after",
            async_scheduling=False,
            speculative_config=speculative,
        )
    return max(served.decoding(batch, k), key=lambda counts: (counts.kernels.total(), counts.graphs)).budget()


def measure_ranks(pair: Models, batch: int, shape: dict[str, int] | None, wanted: str) -> list[dict[str, int]]:
    """Return the totals of the round, of each of two target ranks, that launched most on rank 0."""
    draft = {"method": "draft_model", "model": str(pair[1]), "placement": "dedicated"}
    config = configure(
        pair,
        tensor_parallel_size=2,
        speculative_config=None if shape is None else {**draft, **shape},
        max_num_seqs=batch,
        max_num_batched_tokens=128,
        device="cuda",
        enforce_eager=wanted != "after",
        async_scheduling=False,
        skip_self_check=True,
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        pretended_workers(patch) as workers,
        only(batch, "greedy"),
        quick_turns(),
    ):
        engine = threaded(config, body=workers.serve, floor_s=60.0)
        try:
            engine.put(*(_request(i) for i in range(batch)))
            workers.finish(engine)
        finally:
            engine.built.shutdown()
    k = 0 if shape is None else shape["num_speculative_tokens"]
    first, second = (
        [
            counts
            for plan, counts in workers.decoding(rank)
            if len(plan.rows) == batch and max(row.k for row in plan.rows) == k
        ]
        for rank in range(2)
    )
    at = max(range(len(first)), key=lambda i: (first[i].kernels.total(), first[i].graphs))
    return [first[at].budget(), second[at].budget()]


def _request(number: int) -> Request:
    prompt = (3 + number, 5, 9, 11 + number)
    return Request(str(number), prompt, SamplingParams(), Sampling(seed=1, temperature=0.0), TOKENS)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "after", sys.argv[2:])
