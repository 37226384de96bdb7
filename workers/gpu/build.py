"""Makes what runs whole rounds on a GPU, and captures its graphs."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from protos.progress import ProgressCallback
from workers.compiled.warming import Compilable
from workers.distributed.groups import Solo
from workers.draft.target_cache import TargetCache
from workers.gpu.attention_torch import DeviceAttention, device_attention, most_rows
from workers.gpu.choosing import SAMPLER_KINDS
from workers.gpu.drafts.chain_loop import DraftProgram
from workers.gpu.drafts.drafter import can_capture, drafter_of
from workers.gpu.drafts.drafting import DeviceDrafts
from workers.gpu.drafts.graphed_drafts import GraphedDrafts
from workers.gpu.forward_graphs import ForwardGraphs
from workers.gpu.graphs import GraphCapturer, GraphSet, Program
from workers.gpu.inputs import Buffers, InputRoom, RoundInputs
from workers.gpu.round_rows import DraftPlan, RoundRows
from workers.gpu.rounds import CapturedSteps, DeviceRounds
from workers.gpu.sizes import MOST_ROWS, SamplerKind, Size, StepKey, forward_sizes, row_sizes
from workers.gpu.target_step import TargetStep, write_drafts
from workers.gpu.token_counts import UNCOUNTED
from workers.model.runner import ModelRunner
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

    All ranks of a target call this at once.

    Args:
        worker: of the target, before it serves.
        draft: in the same process, with the same slots; None if there is none. Beside one rank of several it drafts
            with graphs of its own, as in another process: the other ranks are sent its tokens.
        max_draft: the most draft tokens of a row.
        report: called with a line for each set of graphs.
    """
    runner = worker.runner
    loaded = runner.loaded
    if runner.device.type != "cuda" or not isinstance(loaded.mode, TorchMode):
        return None
    if not worker.samples_and_matches or not can_capture(runner):
        return None
    attention = device_attention(runner.attention, runner.cache)
    sizes = _sizes(worker.slots, attention, max_draft)
    if draft is not None and loaded.ranks > 1:
        graph_drafts(draft, max_draft, report)
        draft = None
    return _captured(worker, attention, draft, sizes, report) if sizes else None


def graph_drafts(engine: "DraftEngine", max_draft: int, report: ProgressCallback) -> None:
    """Have a draft that no graph of the target includes draft with graphs of its own; change nothing where it cannot.

    Args:
        engine: before it serves.
        max_draft: the most draft tokens of a row.
        report: called with a line for the graphs.
    """
    slots, sampler, device = engine.worker.slots, engine.worker.sampler, engine.worker.forward.loaded.device
    drafter = drafter_of(engine, max_draft) if device.type == "cuda" else None
    if drafter is None:
        return
    sizes = [size for size in _sizes(slots, drafter.attention, max_draft) if size.queries > 1]
    if not sizes:
        return
    drafts = DeviceDrafts(engine, drafter.shape, max_draft, drafter.area)
    room = InputRoom(slots.blocks.shape[1], drafts.num_known, 0, max_draft + UNCOUNTED)
    is_chain = drafter.shape.width == 1  # candidates for trees are chosen without penalties
    buffers = Buffers.of(sizes, slots, device, room, sampler.vocab_size, penalises=is_chain)
    loops: GraphSet[StepKey] = GraphSet("draft", GraphCapturer(device, Solo()))
    made = {size: drafter.program(buffers.inputs[size]) for size in sizes}
    programs = {
        (size, kind): partial(_draft_and_report, loop, buffers, size, kind)
        for kind in SAMPLER_KINDS
        for size, loop in made.items()
    }
    loops.capture(programs, partial(_prepare, buffers, slots, sampler), report)
    slots.clear()
    if len(loops):
        engine.proposer = GraphedDrafts(engine, drafts, loops, buffers)


def capture_forwards(runners: Mapping[str, Compilable], most_tokens: int, report: ProgressCallback) -> None:
    """Have forwards of prompts, and of rounds that graphs do not run whole, run as graphs; change nothing on a CPU.

    All ranks of a target call this at once.

    Args:
        runners: by name, before they serve. Some have forwards that no graph repeats.
        most_tokens: of a round.
        report: called with a line for the graphs of each.
    """
    for name, runner in runners.items():
        if not isinstance(runner, ModelRunner) or not isinstance(runner.attention, DeviceAttention):
            continue
        sizes = forward_sizes(len(runner.slots.known_len), most_tokens)
        if sizes and can_capture(runner) and runner.kv_window is None:
            graphs = ForwardGraphs(f"forwards of the {name}", runner, runner.attention, sizes)
            graphs.capture(report)
            runner.captured = graphs


def _draft_and_report(loop: DraftProgram, buffers: Buffers, size: Size, kind: SamplerKind) -> None:
    loop.run(kind)
    line = 2 * size.queries - 1
    write_drafts(buffers.inputs[size], buffers.results.on_device[: size.rows * line].view(size.rows, line))


def _sizes(slots: SlotTable, attention: DeviceAttention | None, max_draft: int) -> list[Size]:
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
    most_drafted = max(size.queries for size in sizes) - 1
    drafter = None if draft is None or most_drafted == 0 else drafter_of(draft, most_drafted)
    drafts = None if drafter is None else DeviceDrafts(drafter.engine, drafter.shape, most_drafted, drafter.area)
    # Chains of one token leave nothing to move; a draft that reads the target's cache needs the moves before it drafts.
    most_moves = 0 if draft is not None and isinstance(draft.worker.cache, TargetCache) else most_drafted
    most_moves = most_moves if most_moves > 1 else 0
    room = InputRoom(
        slots.blocks.shape[1], 1 if drafts is None else drafts.num_known, most_moves, most_drafted + UNCOUNTED
    )
    samples = runner.loaded.group.rank == 0
    buffers = Buffers.of(sizes, slots, runner.device, room, sampler.vocab_size, penalises=samples)
    area = None if drafter is None else drafter.area
    steps = {
        size: TargetStep(runner, attention, buffers.inputs[size], buffers.results, sampler.vocab_size, area=area)
        for size in sizes
    }
    capturer = GraphCapturer(runner.device, runner.loaded.group)
    targets: GraphSet[StepKey] = GraphSet("target", capturer)
    loops: GraphSet[StepKey] = GraphSet("draft", capturer)
    prepare = partial(_prepare, buffers, slots, sampler)
    targets.capture(_programs(steps), prepare, report)
    moves: GraphSet[Size] = GraphSet("moves of K and V", capturer)
    if most_moves and len(targets):
        moved = {size: partial(_move, runner, buffers.inputs[size]) for size in sizes}
        moves.capture(moved, lambda size: prepare((size, "greedy")), report)
    if drafter is not None and len(targets):
        limit = most_rows(drafter.attention, slots.blocks.shape[1] * slots.block_size)
        drafting = [size for size in sizes if size.queries > 1 and (limit is None or size.rows <= limit)]
        made = {size: drafter.program(buffers.inputs[size]) for size in drafting}
        loops.capture(_programs(made), prepare, report)
    slots.clear()
    return DeviceRounds(worker, drafts, CapturedSteps(buffers, steps, targets, loops, moves))


def _move(runner: ModelRunner, inputs: RoundInputs) -> None:
    runner.cache.move_on_device(inputs.on_device["moves_2M"].unbind(0))


def _prepare(buffers: Buffers, slots: SlotTable, sampler: Sampler, key: StepKey) -> None:
    """Give the device one row to run: in block 0, which no sequence has yet."""
    slots.known_len[0] = 2
    slot_1 = np.zeros(1, np.int64)
    drafted_1 = slot_1 + key[0].queries - 1
    plan = DraftPlan(drafted_1, slot_1, drafted_1, slot_1 + 1, slot_1, slot_1)
    rows = RoundRows(slot_1, slot_1, sampler.limits(slot_1), sampler.penalties(slot_1), plan)
    buffers.inputs[key[0]].send(rows)
    buffers.results.receive(1)  # waits: the next row may be written over this one


def _programs(steps: Mapping[Size, TargetStep] | Mapping[Size, DraftProgram]) -> dict[StepKey, Program]:
    """Return a program for each size and kind; sizes of the simplest kind first, should a later one fail."""
    return {(size, kind): partial(step.run, kind) for kind in SAMPLER_KINDS for size, step in steps.items()}
