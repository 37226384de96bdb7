"""Heads without attention draft with one graph what they draft with single kernels, whatever each row wants."""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import ANY_DEPTH, Draft, DraftRow
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from tests.support.gpu.counts import Counts
from tests.support.gpu.engine import lasting_tensors, only
from tests.support.gpu.machine import pretended_gpu
from tests.support.models import synthetic, tiny_models
from tests.support.models.synthetic import Synthetic
from tests.workers.gpu.test_graphed_drafts import ROWS, SAMPLING, make_engine, send_features
from tests.workers.gpu.test_graphed_drafts import compare as compare_rounds
from workers.draft.engine import DraftEngine
from workers.gpu.drafts.graphed_drafts import GraphedDrafts
from workers.gpu.sizes import SamplerKind

CHAIN = {"num_speculative_tokens": 4, "draft_shape": "chain"}
TREE = {"num_speculative_tokens": 9, "draft_shape": "tree"}
GIVEN = {
    "num_speculative_tokens": 9,
    "speculative_token_tree": [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2], [0, 1, 1], [1, 0, 0]],
}
BEAMS = {"num_speculative_tokens": 9, "eagle_topk": 3, "num_steps": 3}
SHAPES = {"chain": CHAIN, "tree": TREE, "given": GIVEN, "beams": BEAMS}


def prefixed(target: Path) -> Synthetic:
    """Hydra with its prefix layer, which has a KV cache."""
    return synthetic.hydra(target, prefix=True)


def truncated(target: Path) -> Synthetic:
    """Medusa with heads over fewer ids than the target has."""
    return synthetic.medusa_vllm(target, kept=40)


MAKERS: dict[str, Callable[[Path], Synthetic]] = {
    "medusa": synthetic.medusa,
    "truncated": truncated,
    "hydra": synthetic.hydra,
    "prefixed": prefixed,
    "mlp_speculator": synthetic.mlp_speculator,
    "recurrent": synthetic.recurrent,
}
SAMPLINGS: dict[SamplerKind, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 0.8},
    "limited": {"temperature": 0.9, "top_p": 0.9, "top_k": 60},
}


class Wanted(NamedTuple):
    """A row: its text, and what it wants."""

    tokens: list[int]
    k: int
    depth: int
    sampling: SamplerKind
    seed: int


def rows_wanted(most: int) -> st.SearchStrategy[list[Wanted]]:
    """Return rows whose drafts have at most *most* nodes."""
    row = st.builds(
        Wanted,
        st.lists(st.integers(3, 90), min_size=2, max_size=20),
        st.just(most) | st.integers(1, most),
        st.sampled_from([0, 1, 2, 3, ANY_DEPTH, ANY_DEPTH]),
        st.sampled_from([*SAMPLINGS]),
        st.integers(0, 1 << 40),
    )
    return st.lists(row, min_size=1, max_size=ROWS)


def draft(engine: DraftEngine, wanted: list[Wanted], generation: int) -> list[Draft]:
    """Return what the proposer drafts for new sequences, before the engine cuts it to size."""
    new, rows = [], []
    for slot, each in enumerate(wanted):
        sampling, known = Sampling(seed=each.seed, **SAMPLINGS[each.sampling]), len(each.tokens)
        new.append(NewSequence(slot, each.tokens, known, sampling, generation))
        blocks = list(range(slot * 5, slot * 5 + 5))
        versions = [generation] * len(blocks)
        rows.append(Row(slot, known - 1, 1, known, each.k, True, each.tokens, blocks, versions, depth=each.depth))
    plan = RoundPlan(generation, rows, new, speculates=True)
    engine.worker.slots.apply(plan)
    for slot, each in enumerate(wanted):
        send_features(engine, slot, 0, len(each.tokens) - 1)
    asked = [DraftRow(slot, each.k, depth=each.depth) for slot, each in enumerate(wanted)]
    engine.begin()
    return [found.first(len(found)) for found in engine.worker.propose(engine.proposer, asked)]  # in normal form


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models") / "target", num_hidden_layers=1)


def compare(target: Path, folder: Path, maker: str, shape: dict[str, Any], examples: int) -> None:
    """Draft for rows of any kind with graphs and on a CPU, and compare the drafts."""
    made = MAKERS[maker](target)
    options = {"method": made.method, "model": str(made.write(folder)), **shape}
    expected, generations, drafted = make_engine(target, "cpu", options), count(1), list[Draft]()
    with pretended_gpu() as machine, only(ROWS, *SAMPLINGS):
        engine = make_engine(target, "cuda", options)
        assert isinstance(engine.proposer, GraphedDrafts)

        @settings(max_examples=examples, deadline=None, database=None)
        @given(rows_wanted(shape["num_speculative_tokens"]))
        def agree(wanted: list[Wanted]) -> None:
            generation = next(generations)
            machine.reset()
            found = draft(engine, wanted, generation)
            launched: Counts = machine.reset()
            assert found == draft(expected, wanted, generation)
            assert (launched.graphs, launched.syncs.total(), launched.to_host.total()) == (1, 1, 1)
            drafted.extend(found)

        agree()
    assert any(not each.is_chain for each in drafted) == (shape is not CHAIN)
    static = lasting_tensors(engine)
    for graph in machine.capture.graphs:
        graph.reads_only(static)


QUICK = [
    ("medusa", "tree"),
    ("hydra", "given"),
    ("prefixed", "tree"),
    ("mlp_speculator", "chain"),
    ("recurrent", "beams"),
]
ALL = [(maker, shape) for maker in MAKERS for shape in SHAPES if shape != "beams" or maker == "recurrent"]


@pytest.mark.parametrize(("maker", "shape"), QUICK)
def test_drafts_are_those_of_single_kernels(target: Path, tmp_path: Path, maker: str, shape: str) -> None:
    compare(target, tmp_path / "draft", maker, SHAPES[shape], 12)


@pytest.mark.full
@pytest.mark.parametrize(("maker", "shape"), ALL)
def test_many_drafts_are_those_of_single_kernels(target: Path, tmp_path: Path, maker: str, shape: str) -> None:
    compare(target, tmp_path / "draft", maker, SHAPES[shape], 60)


def test_each_round_reads_the_features_that_arrived_last(target: Path, tmp_path: Path) -> None:
    folder = synthetic.medusa(target).write(tmp_path / "draft")
    counts = compare_rounds(target, SAMPLING, {"method": "medusa", "model": str(folder), **TREE}, "greedy", "drawn")
    assert {(each.graphs, each.syncs.total()) for each in counts} == {(1, 1)}
