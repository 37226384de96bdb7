"""Forwards alone as CUDA graphs: of prompts, and of rounds whose sampling or acceptance takes place on the host.

A forward launches a dozen kernels a layer. For up to a few thousand tokens the host takes longer to launch them than
the device to run them. Here a forward of any rows is padded to one of a few numbers of tokens, and launched as one.
"""

from collections.abc import Sequence as Seq
from functools import partial

import numpy as np
import torch

from protos.progress import ProgressCallback
from workers.attention.batch import AttentionMetadata, Batch, Ints
from workers.compile import Outputs
from workers.gpu.attention_torch import DeviceAttention
from workers.gpu.graphs import GraphCapturer, GraphSet
from workers.gpu.metadata import DeviceMetadata
from workers.gpu.sizes import ForwardSize
from workers.gpu.staging import Layout, StagingArea, fill
from workers.model.runner import ModelRunner


class ForwardGraphs:
    """The forwards of one runner. See `workers.model.runner.CapturedForwards`.

    Args:
        name: for messages.
        runner: of a model without recurrent layers. All of its ranks do the same at once.
        attention: the runner's.
        sizes: to capture, the largest first.
    """

    def __init__(self, name: str, runner: ModelRunner, attention: DeviceAttention, sizes: Seq[ForwardSize]) -> None:
        self._runner, self._slots, self._attention = runner, runner.slots, attention
        self._group = runner.loaded.group
        width = runner.slots.blocks.shape[1]
        staging = StagingArea(max(_layout(size, width).size for size in sizes), runner.device)
        self._staging = staging
        self._inputs = {size: _Inputs(size, width, runner.block_size, staging) for size in sizes}
        self._sizes = sorted(sizes)
        self._copied = [torch.cuda.Event() for _ in staging.mirrors]  # type: ignore[no-untyped-call]
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # All sizes write here: what each wrote for itself would add up. Ranks other than 0 get no logits.
        columns = 0 if self._group.rank else runner.loaded.vocab_size
        self._logits_NV = torch.zeros(sizes[0].wanted, columns, device=runner.device)
        self._states_TF: torch.Tensor | None = None
        self._graphs: GraphSet[ForwardSize] = GraphSet(name, GraphCapturer(runner.device, self._group))

    def capture(self, report: ProgressCallback) -> None:
        """Capture all sizes; *report* is called with one line. Writes to block 0, which no sequence has yet."""
        programs = {size: partial(self._forward, each) for size, each in self._inputs.items()}
        self._graphs.capture(programs, self._prepare, report)

    def run(self, batch: Batch, wanted_N: Ints) -> Outputs | None:
        """See `CapturedForwards`."""
        size = self._size(batch, wanted_N)
        if size is None:
            return None
        if self._group.rank:
            self._group.check(self._done)  # of the forward before, whose results were not read here
        self._send(size, batch, wanted_N)
        self._graphs.launch(size)
        self._done.record()
        if self._group.rank == 0:
            self._group.check(self._done)  # one rank alone waits for nothing
        states_TF = None if self._states_TF is None else self._states_TF[: len(batch.tokens_T)]
        return self._logits_NV[: len(wanted_N)], states_TF

    def _size(self, batch: Batch, wanted_N: Ints) -> ForwardSize | None:
        """Return the smallest captured size with room for *batch*; None if there is none."""
        if batch.tree_masks is not None:
            return None
        needed = ForwardSize(len(batch.tokens_T), len(batch.slots_R), len(wanted_N))
        return next((size for size in self._sizes if size.has_room_for(needed) and size in self._graphs), None)

    def _send(self, size: ForwardSize, batch: Batch, wanted_N: Ints) -> None:
        plan = AttentionMetadata.of(batch, self._slots.blocks, self._runner.block_size)
        mirror = self._staging.next_mirror()
        self._copied[mirror].synchronize()  # of the round before last: chunks of prompts return nothing to wait for
        self._inputs[size].write(mirror, plan, batch, wanted_N)
        self._staging.send(mirror, self._inputs[size].num_bytes)
        self._copied[mirror].record()

    def _prepare(self, size: ForwardSize) -> None:
        zero_1, one_1 = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._send(size, Batch(zero_1, zero_1, one_1, one_1), zero_1)

    def _forward(self, inputs: "_Inputs") -> None:
        found = inputs.on_device
        tokens_1T, positions_1T = found["tokens_T"][None], found["positions_T"][None]
        self._attention.use(inputs.metadata)
        logits_NV, states_TF = self._runner.call(tokens_1T, positions_1T, found["wanted_N"], self._attention)
        self._logits_NV[: len(logits_NV)].copy_(logits_NV)
        if states_TF is None:
            return
        if self._states_TF is None:  # in the first run, of the largest size, before any is captured
            self._states_TF = torch.zeros_like(states_TF)
        self._states_TF[: len(states_TF)].copy_(states_TF)


def _layout(size: ForwardSize, width: int) -> Layout:
    """Return where the input of a size lies; *width* is of block tables."""
    tokens, rows = (size.tokens,), (size.rows,)
    return Layout(
        {
            "tokens_T": ("i8", tokens),
            "positions_T": ("i8", tokens),
            "cache_index_T": ("i8", tokens),
            "wanted_N": ("i8", (size.wanted,)),
            "rows_T": ("i4", tokens),
            "starts_R": ("i4", rows),
            "lengths_R": ("i4", rows),
            "offsets_R": ("i4", rows),
            "first_valid_R": ("i4", rows),
            "tables_RB": ("i4", (size.rows, width)),
        }
    )


class _Inputs:
    """The input of one size: views of the staging area's mirrors, and of the area on the device."""

    def __init__(self, size: ForwardSize, width: int, block_size: int, staging: StagingArea) -> None:
        places = _layout(size, width)
        self.num_bytes = places.size
        self._mirrors = [places.arrays(mirror.numpy()) for mirror in staging.mirrors]
        self.on_device = places.tensors(staging.on_device)
        device = staging.on_device.device
        nothing_R = torch.zeros(size.rows, dtype=torch.int32, device=device)
        found = self.on_device
        self.metadata = DeviceMetadata(
            starts_R=found["starts_R"],
            lengths_R=found["lengths_R"],
            offsets_R=found["offsets_R"],
            tables_RB=found["tables_RB"],
            rows_T=found["rows_T"],
            cache_index_T=found["cache_index_T"],
            first_R=nothing_R,
            sizes_R=nothing_R,
            positions_RA=nothing_R[:, None],
            visible_TW=torch.zeros((size.tokens, 0), dtype=torch.int64, device=device),
            first_valid_R=found["first_valid_R"],
            block_size=block_size,
            max_length=size.tokens,
            max_blocks=width,
        )

    def write(self, mirror: int, plan: AttentionMetadata, batch: Batch, wanted_N: Ints) -> None:
        """Write the input of a forward."""
        into = self._mirrors[mirror]
        num_rows, num_tokens = len(batch.slots_R), len(batch.tokens_T)
        fill(into["tokens_T"], batch.tokens_T, 0)
        fill(into["positions_T"], batch.positions_T, 0)
        fill(into["cache_index_T"], plan.cache_index_T, -1)
        fill(into["rows_T"], np.repeat(np.arange(num_rows), batch.lengths_R), -1)
        fill(into["wanted_N"], wanted_N, 0)
        fill(into["starts_R"], batch.starts_R, 0)
        fill(into["lengths_R"], batch.lengths_R, 0)
        fill(into["offsets_R"], batch.offsets_R, num_tokens)
        fill(into["first_valid_R"], np.zeros(num_rows) if batch.first_valid_R is None else batch.first_valid_R, 0)
        tables_RB = plan.tables_RB
        into["tables_RB"][:num_rows, : tables_RB.shape[1]] = tables_RB
