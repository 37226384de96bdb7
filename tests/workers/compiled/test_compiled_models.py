"""Models and heads compiled ahead of time compute what eager does; batch-invariant ones are never compiled."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import demo
from protos.config.engine import ModelConfig
from protos.worker_messages import Allocate
from tests.conftest import ModelPair
from tests.support.distributed.engine import configure
from tests.support.models.tiny_models import build
from tests.workers.model.test_models import feed, make_runner, paged_logits, sequences
from workers.compile import CompileError, Weights
from workers.compiled import child, graphs, store
from workers.model import methods
from workers.model.loader import load
from workers.model.methods import Methods
from workers.model.module_runner import LoadedModule, ModuleRunner
from workers.model.runner import ModelRunner
from workers.slots import SlotTable

H = 8
HEADS_OF_DEMO = Path(demo.__file__).parent / "heads"


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setattr(store, "cache_folder", lambda *_: folder)


def compiled(runner: ModelRunner) -> None:
    folder = store.begin()
    runner.compile_into(folder, lambda: None)
    runner.load_compiled(folder)


@pytest.mark.full
@pytest.mark.parametrize(("family", "layers"), [("llama", 1), ("gemma2", 2)], ids=["llama", "windows, caps and casts"])
def test_compiled_equals_eager_at_every_size(family: str, layers: int, tmp_path: Path) -> None:
    rows = sequences()
    folder = build(family, tmp_path, num_hidden_layers=layers)
    expected = paged_logits(make_runner(folder, rows), rows)
    runner = make_runner(folder, rows)
    compiled(runner)
    for mine, other in zip(paged_logits(runner, rows), expected, strict=True):
        assert (mine - other).abs().max() <= 1e-5 * max(1.0, other.abs().max().item())
        assert not torch.equal(mine, other) or len(mine) == 1, "the compiled forward did not run"


def test_batch_invariant_and_split_models_are_never_compiled(tmp_path: Path) -> None:
    folder = build("llama", tmp_path, num_hidden_layers=1)
    for invariant in (False, True):
        loaded = load(ModelConfig(model=str(folder), device="cpu", batch_invariant=invariant))
        runner = ModelRunner(loaded, SlotTable(1, 8, 4), 2, 4)
        assert (runner.key() is None) == invariant
        assert not loaded.mode.is_compiled(2)


def test_a_library_with_other_results_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sequences()[:1]
    runner = make_runner(build("llama", tmp_path, num_hidden_layers=1), rows)
    expected = feed(runner, [0], [0], [20])

    def wrong(folder: Path, name: str) -> object:
        def run(*inputs: torch.Tensor) -> list[torch.Tensor]:
            return [runner._eager(*inputs)[0] + 0.1]

        return run

    monkeypatch.setattr("workers.model.runner.load_graph", wrong)
    with pytest.raises(CompileError, match="differ from eager"):
        runner.load_compiled(tmp_path)
    assert torch.equal(feed(runner, [0], [0], [20]), expected)


def test_loading_does_not_touch_the_cache_of_running_sequences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sequences()[:1]
    runner = make_runner(build("llama", tmp_path, num_hidden_layers=1), rows)
    whole = feed(runner, [0], [0], [20])
    feed(runner, [0], [0], [19])
    monkeypatch.setattr(
        "workers.model.runner.load_graph",
        lambda folder, name: lambda *inputs: [runner._eager(*inputs)[0]],
    )
    runner.load_compiled(tmp_path)
    runner.measure_size(4)
    torch.testing.assert_close(feed(runner, [0], [19], [1])[-1], whole[-1], atol=1e-5, rtol=1e-4)


class Heads(nn.Module):
    """Two heads over states, without layers."""

    layers = ()
    max_model_len = vocab_size = 11
    compiled_methods: ClassVar[dict[str, int]] = {"logits": 2}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(H, 5) for _ in range(2)).requires_grad_(False)

    def logits(self, states_NH: torch.Tensor, head: int) -> torch.Tensor:
        logits_NV: torch.Tensor = self.heads[head](states_NH)
        return logits_NV


def states(count: int) -> torch.Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(count))


@pytest.mark.full
@torch.inference_mode()
def test_heads_compiled_equal_eager(tmp_path: Path) -> None:
    plain, module = Heads(), Methods(Heads())
    with module.watched():
        for count in (1, 3):
            module.logits(states(count), 1)
    folder = store.begin()
    module.compile_into(folder, Weights(torch.float32, 1 << 10, 1 << 40))
    assert sorted(graphs.read_index(folder)) == ["logits-1-any", "logits-1-one"]
    module.load(folder, lambda call, count: call(), torch.float32)
    for count in (1, 2, 7, 33):
        torch.testing.assert_close(module.logits(states(count), 1), plain.logits(states(count), 1))
        assert torch.equal(module.logits(states(count), 0), plain.logits(states(count), 0)), "was not compiled"


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_a_heads_entry_has_all_graphs_whatever_the_number_of_sequences(
    max_num_seqs: int, demo_pair: ModelPair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    monkeypatch.setattr(methods, "compile_graph", lambda folder, name, *rest, single: names.append(name))
    head = {"method": "medusa", "model": str(HEADS_OF_DEMO / "medusa"), "num_speculative_tokens": 2}
    pair = (demo_pair.target, demo_pair.draft)
    config = configure(pair, speculative_config=head, max_num_seqs=max_num_seqs)
    child._compile_draft(config, Allocate(1, 64, 4096), tmp_path)
    assert sorted(names) == ["logits-0-any", "logits-0-one", "logits-1-any", "logits-1-one"]


@torch.inference_mode()
def test_a_cast_that_changes_nothing_is_compiled_with_packed_weights() -> None:
    weight_H = nn.Parameter(states(1)[0], requires_grad=False)

    def scaled(states_NH: torch.Tensor) -> torch.Tensor:
        return states_NH * (1.0 + weight_H.float())

    folder, weights = store.begin(), Weights(torch.float32, 1 << 10, 1 << 40)
    assert weights.are_packed
    graphs.compile_graph(folder, "one", scaled, [graphs.Input((1, H), "float32", 0)], weights, single=True)
    torch.testing.assert_close(graphs.load_graph(folder, "one")(states(1))[0], scaled(states(1)))


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (RuntimeError("no such operator"), False),
        (OSError("another error of the system"), True),
        (RuntimeError("C++ compile error\n/tmp/x.s: No space left on device"), True),
        (RuntimeError("g++: fatal error: Killed signal terminated program cc1plus"), True),
        (RuntimeError("collect2: fatal error: ld terminated with signal 9 [Killed]"), True),
        (RuntimeError("cannot write: Disk quota exceeded"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), True),
    ],
    ids=lambda value: str(value).splitlines()[0][:20],
)
def test_want_of_memory_and_disk_may_pass(error: Exception, may_pass: bool) -> None:
    def fails(states_NH: torch.Tensor) -> torch.Tensor:
        raise ValueError("while it was traced") from error

    weights, inputs = Weights(torch.float32, 0, 0), [graphs.Input((1, H), "float32", 0)]
    with pytest.raises(CompileError, match="one cannot be compiled: ValueError: while it was traced") as found:
        graphs.compile_graph(store.begin(), "one", fails, inputs, weights, single=True)
    assert found.value.may_pass == may_pass


def test_what_the_cpp_compiler_says_is_named() -> None:
    def fails(states_NH: torch.Tensor) -> torch.Tensor:
        raise ValueError("C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\nx.cpp:3: error: no such thing\nint i;")

    inputs = [graphs.Input((1, H), "float32", 0)]
    with pytest.raises(CompileError, match=r"^one cannot be compiled: ValueError: x\.cpp:3: error: no such thing$"):
        graphs.compile_graph(store.begin(), "one", fails, inputs, Weights(torch.float32, 0, 0), single=True)


def test_modules_that_name_no_methods_are_not_compiled() -> None:
    class Bare(Heads):
        compiled_methods: ClassVar[dict[str, int]] = {}

    slots = SlotTable(1, 8, 4)
    keys = [
        ModuleRunner(LoadedModule(module, torch.float32, torch.float32, torch.device("cpu")), slots, 2, 4).key()
        for module in (Heads(), Bare())
    ]
    assert keys[0] is not None
    assert keys[1] is None
    assert np.all(slots.known_len == 0)
