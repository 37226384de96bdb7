"""Makes what runs whole rounds on a GPU, and captures its graphs."""

from collections.abc import Mapping
from functools import partial

import numpy as np

from protos.progress import ProgressCallback
from workers.draft.engine import DraftEngine
from workers.gpu.attention_torch import DeviceAttention, device_attention, most_rows
from workers.gpu.chains import DeviceChains
from workers.gpu.choosing import CHOOSERS
from workers.gpu.draft_loop import DraftLoop
from workers.gpu.graphs import GraphCapturer, GraphSet, Program
from workers.gpu.inputs import RoundInputs, RoundRows, layout
from workers.gpu.rounds import CapturedSteps, DeviceRounds, StepKey
from workers.gpu.sizes import Size, row_sizes
from workers.gpu.staging import ResultArea, StagingArea
from workers.gpu.target_step import TargetStep
from workers.model.torch_mode import TorchMode
from workers.slots import SlotTable
from workers.target import TargetWorker

MOST_ROWS = 256
"""Rows of the largest size that is captured."""


def make_rounds(
    worker: TargetWorker, draft: DraftEngine | None, max_draft: int, report: ProgressCallback
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
    if not worker.samples_and_matches:
        return None
    chains = DeviceChains.of(draft)
    attention = device_attention(runner.attention, runner.cache)
    sizes = _sizes(worker.slots, attention, max_draft)
    if not sizes:
        return None
    return _captured(worker, attention, chains, sizes, report)


def _sizes(slots: SlotTable, attention: DeviceAttention, max_draft: int) -> list[Size]:
    """Return the sizes to capture, the largest first."""
    limit = most_rows(attention, slots.blocks.shape[1] * slots.block_size)
    most = min(len(slots.known_len), MOST_ROWS, MOST_ROWS if limit is None else limit)
    queries = sorted({1, 1 + max_draft})
    return sorted((Size(rows, count) for rows in row_sizes(most) for count in queries), reverse=True) if most else []


def _captured(
    worker: TargetWorker,
    attention: DeviceAttention,
    chains: DeviceChains | None,
    sizes: list[Size],
    report: ProgressCallback,
) -> DeviceRounds:
    slots, runner, vocab_size = worker.slots, worker.runner, worker.sampler.vocab_size
    staging = StagingArea(max(layout(size, slots.blocks.shape[1]).size for size in sizes), runner.device)
    results = ResultArea(max(2 * size.rows * size.queries for size in sizes), runner.device)
    inputs = {size: RoundInputs(size, slots, staging) for size in sizes}
    steps = {size: TargetStep(runner, attention, inputs[size], results, vocab_size) for size in sizes}
    capturer = GraphCapturer(runner.device)
    targets: GraphSet[StepKey] = GraphSet("target", capturer)
    loops: GraphSet[StepKey] = GraphSet("draft", capturer)

    def prepare(key: StepKey) -> None:
        """Give the device one row to run: in block 0, which no sequence has yet."""
        slots.known_len[0] = 2
        inputs[key[0]].send(_dummy(worker, drafted=key[0].queries - 1))
        results.receive(1)  # waits: the next dummy may be written over this one

    targets.capture(_programs(steps), prepare, report)
    if chains is not None and len(targets):
        drafter = device_attention(chains.runner.attention, chains.runner.cache)
        drafting = [size for size in sizes if size.queries > 1]
        made = {size: DraftLoop(chains.runner, drafter, inputs[size], vocab_size) for size in drafting}
        loops.capture(_programs(made), prepare, report)
    slots.clear()
    return DeviceRounds(worker, chains, CapturedSteps(inputs, results, steps, targets, loops))


def _programs(steps: Mapping[Size, TargetStep] | Mapping[Size, DraftLoop]) -> dict[StepKey, Program]:
    """Return a program for each size and chooser."""
    return {(size, chooser): partial(step.run, chooser) for size, step in steps.items() for chooser in CHOOSERS}


def _dummy(worker: TargetWorker, drafted: int) -> RoundRows:
    slot_1 = np.zeros(1, np.int64)
    limits = worker.sampler.limits(slot_1)
    return RoundRows(slot_1, slot_1 + drafted, slot_1, limits, slot_1)
