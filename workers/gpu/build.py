"""Makes what runs whole rounds on a GPU, and captures its graphs."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from protos.progress import ProgressCallback
from workers.gpu.attention_torch import DeviceAttention, device_attention, most_rows
from workers.gpu.chains import DeviceChains, can_capture, loop_runner
from workers.gpu.choosing import CHOOSERS
from workers.gpu.draft_loop import DraftLoop
from workers.gpu.graphed_chains import GraphedChains
from workers.gpu.graphs import GraphCapturer, GraphSet, Program
from workers.gpu.inputs import Buffers, RoundRows
from workers.gpu.rounds import CapturedSteps, DeviceRounds
from workers.gpu.sizes import MOST_ROWS, Chooser, Size, StepKey, row_sizes
from workers.gpu.target_step import TargetStep
from workers.model.torch_mode import TorchMode
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine
    from workers.target import TargetWorker


def make_rounds(
    worker: "TargetWorker", draft: "DraftEngine | None", max_draft: int, report: ProgressCallback
) -> DeviceRounds | None:
    """Return what runs rounds of *worker* as graphs; None on a CPU, and where the model or rule has no graph.

    Args:
        worker: of the target, before it serves.
        draft: in the same process, with the same slots; None if there is none.
        max_draft: the most draft tokens of a row.
        report: called with a line for each set of graphs.
    """
    runner = worker.runner
    loaded = runner.loaded
    if runner.device.type != "cuda" or loaded.ranks > 1 or not isinstance(loaded.mode, TorchMode):
        return None
    if not worker.samples_and_matches or not can_capture(runner):
        return None
    attention = device_attention(runner.attention, runner.cache)
    sizes = _sizes(worker.slots, attention, max_draft)
    return _captured(worker, attention, draft, sizes, report) if sizes else None


def graph_chains(engine: "DraftEngine", max_draft: int, report: ProgressCallback) -> None:
    """Have a draft model that is alone in its process draft chains with a graph; change nothing where it cannot.

    Args:
        engine: before it serves.
        max_draft: the most draft tokens of a row.
        report: called with a line for the graphs.
    """
    runner = loop_runner(engine)
    if runner is None or runner.device.type != "cuda":
        return
    slots, sampler = engine.worker.slots, engine.worker.sampler
    attention = device_attention(runner.attention, runner.cache)
    sizes = [size for size in _sizes(slots, attention, max_draft) if size.queries > 1]
    if not sizes:
        return
    buffers = Buffers.of(sizes, slots, runner.device)
    loops: GraphSet[StepKey] = GraphSet("draft", GraphCapturer(runner.device))
    made = {size: DraftLoop(runner, attention, buffers.inputs[size], sampler.vocab_size) for size in sizes}
    programs = {
        (size, chooser): partial(_draft_and_report, loop, buffers, size, chooser)
        for chooser in CHOOSERS
        for size, loop in made.items()
    }
    loops.capture(programs, partial(_prepare, buffers, slots, sampler), report)
    slots.clear()
    if len(loops):
        engine.proposer = GraphedChains(engine, loops, buffers)


def _draft_and_report(loop: DraftLoop, buffers: Buffers, size: Size, chooser: Chooser) -> None:
    loop.run(chooser)
    tokens_RQ = buffers.inputs[size].on_device["tokens_RQ"]
    buffers.results.on_device[: tokens_RQ.numel()].copy_(tokens_RQ.view(-1))


def _sizes(slots: SlotTable, attention: DeviceAttention, max_draft: int) -> list[Size]:
    """Return the sizes to capture, the largest first."""
    limit = most_rows(attention, slots.blocks.shape[1] * slots.block_size)
    most = min(len(slots.known_len), MOST_ROWS, MOST_ROWS if limit is None else limit)
    queries = sorted({1, 1 + max_draft})
    return sorted((Size(rows, count) for rows in row_sizes(most) for count in queries), reverse=True) if most else []


def _captured(
    worker: "TargetWorker",
    attention: DeviceAttention,
    draft: "DraftEngine | None",
    sizes: list[Size],
    report: ProgressCallback,
) -> DeviceRounds:
    slots, runner, sampler = worker.slots, worker.runner, worker.sampler
    buffers = Buffers.of(sizes, slots, runner.device)
    steps = {
        size: TargetStep(runner, attention, buffers.inputs[size], buffers.results, sampler.vocab_size) for size in sizes
    }
    capturer = GraphCapturer(runner.device)
    targets: GraphSet[StepKey] = GraphSet("target", capturer)
    loops: GraphSet[StepKey] = GraphSet("draft", capturer)
    prepare = partial(_prepare, buffers, slots, sampler)
    targets.capture(_programs(steps), prepare, report)
    drafter = None if draft is None else loop_runner(draft)
    if drafter is not None and len(targets):
        over = device_attention(drafter.attention, drafter.cache)
        drafting = [size for size in sizes if size.queries > 1]
        made = {size: DraftLoop(drafter, over, buffers.inputs[size], sampler.vocab_size) for size in drafting}
        loops.capture(_programs(made), prepare, report)
    slots.clear()
    chains = DeviceChains(draft) if draft is not None and len(loops) else None
    return DeviceRounds(worker, chains, CapturedSteps(buffers, steps, targets, loops))


def _prepare(buffers: Buffers, slots: SlotTable, sampler: Sampler, key: StepKey) -> None:
    """Give the device one row to run: in block 0, which no sequence has yet."""
    slots.known_len[0] = 2
    slot_1 = np.zeros(1, np.int64)
    rows = RoundRows(slot_1, slot_1 + key[0].queries - 1, slot_1, sampler.limits(slot_1), slot_1)
    buffers.inputs[key[0]].send(rows)
    buffers.results.receive(1)  # waits: the next row may be written over this one


def _programs(steps: Mapping[Size, TargetStep] | Mapping[Size, DraftLoop]) -> dict[StepKey, Program]:
    """Return a program for each size and chooser; sizes of the simplest chooser first, should a later one fail."""
    return {(size, chooser): partial(step.run, chooser) for chooser in CHOOSERS for size, step in steps.items()}
