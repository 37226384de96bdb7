"""Main memory that each rank of a split model takes, measured in separate processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models.tiny_models import build
from workers.distributed.store import open_store

ROOT = Path(__file__).parents[3]
MEASURE = """
import sys, threading
import torch
from protos.config.engine import ModelConfig
from protos.worker_messages import StoreAddress
from workers.distributed.torch_group import form
from workers.distributed.store import connect_store
from workers.model.loader import load

torch.set_num_threads(1)
folder, port, rank, ranks = sys.argv[1], *map(int, sys.argv[2:])

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

group = form("tp", connect_store(StoreAddress("127.0.0.1", port)), rank, ranks, timeout_s=300)
load(ModelConfig(model=folder + "/tiny", device="cpu"), group)  # loads libraries, which are not counted
before = peak = anonymous()
loaded = threading.Event()

def watch():
    global peak
    while not loaded.wait(0.002):
        peak = max(peak, anonymous())

watcher = threading.Thread(target=watch)
watcher.start()
model = load(ModelConfig(model=folder + "/large", device="cpu", dtype="float32"), group)
touched = float(sum(weight.sum() for weight in model.model.parameters()))
loaded.set()
watcher.join()
print(max(peak, anonymous()) - before, sum(weight.nbytes for weight in model.model.parameters()))
"""


def peaks(folder: Path, ranks: int) -> list[tuple[int, int]]:
    """Return each rank's peak of anonymous memory while it loads, and the bytes of the weights it then holds."""
    _store, address = open_store()
    command = [sys.executable, "-c", MEASURE, str(folder), str(address.port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks)], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE
        )
        for rank in range(ranks)
    ]
    outputs = [process.communicate(timeout=300)[0].split() for process in running]
    assert [process.returncode for process in running] == [0] * ranks
    return [(int(peak), int(held)) for peak, held in outputs]


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_each_of_two_ranks_needs_at_most_six_tenths(family: str, tmp_path: Path) -> None:
    """A bfloat16 checkpoint run in fp32: weights in the checkpoint's dtype would stay mapped files for one rank."""
    build(family, tmp_path / "tiny")
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 16001}
    width = {"intermediate_size": 4096} if family == "llama" else {"intermediate_size": 1024}
    stored = build(family, tmp_path / "stored", num_hidden_layers=6, **sizes, **width)
    half = AutoModelForCausalLM.from_pretrained(stored, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path / "large")
    alone, weights = peaks(tmp_path, 1)[0]
    assert weights >= 400e6
    assert alone >= 0.9 * weights, "the measurement sees the weights"
    shared = peaks(tmp_path, 2)
    assert all(peak <= 0.6 * alone for peak, _ in shared), (alone, shared)
    assert all(peak >= 0.9 * held for peak, held in shared), (alone, shared)
