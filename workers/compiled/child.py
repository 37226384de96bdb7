"""The main function of the child process: load one model, compile its graphs, and put them into the store."""

import json
import os
import shutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch._inductor.config

from protos.config.engine import EngineConfig, SchedulerConfig, from_json
from protos.errors import ModelError
from protos.worker_messages import Allocate
from workers.build import load_target, make_slots
from workers.compile import CompileError
from workers.compiled import store
from workers.distributed.groups import Solo
from workers.draft.engine import SEVERAL_ROWS, make_engine
from workers.draft.load import load_draft
from workers.model.runner import ModelRunner
from workers.sampling.sampler import Sampler

NUM_BLOCKS = 1
"""Blocks of the caches: trials read and write only the first."""


def main() -> None:
    """Compile what the line on standard input asks for; on failure, end with its reason on standard error."""
    order = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with, args=(order["parent"],), daemon=True).start()
    os.nice(order["nice"])
    os.environ["LC_ALL"] = "C"  # errors of the C++ compiler are told apart by their text
    torch.set_num_threads(order["threads"])
    torch._inductor.config.cpp.dynamic_threads = order["dynamic_threads"]
    config, allocate = from_json(order["config"]), Allocate(NUM_BLOCKS, order["max_model_len"], order["vocab_size"])
    folder = store.begin()
    try:
        {"target": _compile_target, "draft": _compile_draft}[order["part"]](config, allocate, folder)
        store.publish(folder, order["key"])
    except (CompileError, ModelError, OSError) as error:
        if isinstance(error, CompileError) and not error.may_pass:
            store.write_failure(order["key"], str(error))
        sys.exit(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile_target(config: EngineConfig, allocate: Allocate, folder: Path) -> None:
    loaded = load_target(config, Solo(), _ignore, with_draft=False)
    slots = make_slots(config, allocate)
    ModelRunner(loaded.model, slots, NUM_BLOCKS, slots.block_size, loaded.taps).compile_into(folder, lambda: None)


def _compile_draft(config: EngineConfig, allocate: Allocate, folder: Path) -> None:
    """Compile what a trial calls. Its steps have room for all its rows: the key does not hold this engine's limits."""
    config = replace(config, scheduler=SchedulerConfig(max_num_seqs=SEVERAL_ROWS))
    draft = load_draft(config, None, _ignore)
    assert draft is not None, "the parent has loaded it"
    slots = make_slots(config, allocate)
    sampler = Sampler(slots, allocate.vocab_size, torch.device("cpu"))
    engine = make_engine(draft, config, slots, sampler, num_blocks=NUM_BLOCKS)
    engine.worker.forward.compile_into(folder, lambda: engine.try_out(config.max_draft))


def _ignore(_line: str) -> None:
    pass


def _end_with(parent: int) -> None:
    """End this process once its parent has ended."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
