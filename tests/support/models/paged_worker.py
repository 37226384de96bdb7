"""A `DraftWorker` over paged KV whose slots hold given texts."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch

from protos.layers import Needs
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from workers.draft.worker import DraftWorker
from workers.features import Features
from workers.model.module_runner import LoadedModule, ModuleRunner
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable

BLOCK = 4


def paged_worker(
    module: Any, texts: Seq[list[int]], features: Seq[torch.Tensor] | None, *, k: int, vocab_size: int
) -> DraftWorker:
    """Return a worker that samples greedily; *features* are the target's of each text, if it is fed any."""
    needs: Needs = "none" if features is None else "all"
    width = (max(map(len, texts)) + k) // BLOCK + 2
    slots = SlotTable(len(texts), width * BLOCK, BLOCK, k)
    loaded = LoadedModule(module, torch.float32, torch.float32, torch.device("cpu"))
    runner = ModuleRunner(loaded, slots, len(texts) * width, BLOCK)
    worker = DraftWorker(runner, slots, Sampler(slots, vocab_size), 1000, needs=needs, shift=module.shift)
    new = [NewSequence(slot, text, len(text), Sampling(0, 0.0), slot + 1) for slot, text in enumerate(texts)]
    blocks = [list(range(width * slot, width * slot + width)) for slot in range(len(texts))]
    rows = [
        Row(slot, 0, len(text), len(text), new_block_ids=blocks[slot], new_block_versions=[1] * width)
        for slot, text in enumerate(texts)
    ]
    slots.apply(RoundPlan(0, rows, new))
    if features is not None:
        table = np.array([(slot, slot + 1, 0, len(text) - 1) for slot, text in enumerate(texts)], np.int64)
        worker.receive(Features(table, torch.cat(list(features))))
    return worker
