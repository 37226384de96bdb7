"""Forwards alone as graphs: which rounds launch them, and the same tokens as without."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest

from protos.messages import Row, Verdict
from slipstream import SamplingParams
from tests.support.gpu.engine import Served, lasting_tensors, llamas, one_ahead, only, serve
from tests.support.gpu.machine import interpreted_kernels, pretended_gpu
from tests.support.identity import generate
from tests.support.models import synthetic
from tests.support.models.tiny_models import perturb
from workers.attention.batch import Batch, Ints
from workers.compile import Outputs
from workers.features import Features
from workers.gpu.forward_graphs import ForwardGraphs
from workers.gpu.sizes import ForwardSize, forward_sizes
from workers.target import TargetWorker

Floats = npt.NDArray[np.float32]
PROMPTS = [[3, 5, 9, 11], [8, 4, 4], [7, 7, 60, 2, 9, 31]]
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
BIAS = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, logit_bias={5: 1.5})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llamas(tmp_path_factory.mktemp("pair"), 1, 1)[0]


def served(target: Path, params: SamplingParams, **options: Any) -> Served:
    """Serve all prompts on a GPU on which forwards of 4 and 24 tokens are captured; no round has more."""
    options = {"max_num_batched_tokens": 24, **options}
    with pretended_gpu() as machine, interpreted_kernels(), only(3, "greedy", forwards=(4, 24)):
        found = serve(machine, target, PROMPTS, params, max_num_seqs=3, **options)
    static = lasting_tensors(found.rank)
    for graph in machine.capture.graphs:
        graph.reads_only(static)
    return found


def test_prompts_and_biased_rounds_launch_one_graph_for_the_forward(target: Path) -> None:
    found = served(target, BIAS)
    assert found.outputs == generate(target, PROMPTS, BIAS, max_model_len=64).outputs
    assert len(found.rounds) == 4
    for _, counts in found.rounds:
        assert counts.graphs == 1
        assert not {"attention_kernel", "norm_kernel", "write_kernel"} & set(counts.kernels)


def test_chunks_of_prompts_are_padded_to_a_captured_size(target: Path) -> None:
    """Chunks that end within a prompt return no logits."""
    found = served(target, GREEDY, max_num_batched_tokens=4, enable_chunked_prefill=True)
    assert found.outputs == generate(target, PROMPTS, GREEDY, max_model_len=64).outputs
    decoding = [counts.graphs for plan, counts in found.rounds if plan.decodes]
    assert {counts.graphs for plan, counts in found.rounds if not plan.decodes} == {1}
    assert decoding == one_ahead(len(decoding))


def test_a_forward_that_no_size_has_room_for_runs_eager(target: Path) -> None:
    with mock.patch("workers.gpu.sizes.MOST_WANTED", 2):
        found = served(target, BIAS)
    assert found.outputs == generate(target, PROMPTS, BIAS, max_model_len=64).outputs
    assert {counts.graphs for _, counts in found.rounds} == {0}


def test_draft_models_feed_prompts_and_draft_by_graphs(target: Path, tmp_path: Path) -> None:
    draft = perturb(target, tmp_path / "draft", noise=0.04)
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    found = served(target, BIAS, speculative_config=speculative)
    assert found.outputs == generate(target, PROMPTS, BIAS, max_model_len=64).outputs
    assert found.proposed >= found.accepted > 0
    assert all(not {"attention_kernel", "norm_kernel"} & set(counts.kernels) for _, counts in found.rounds)


@contextmanager
def recorded_features() -> Iterator[list[tuple[Ints, Floats]]]:
    """Record the table and the features of each round."""
    found, kept = list[tuple[Ints, Floats]](), TargetWorker.kept_features

    def watched(worker: TargetWorker, rows: Seq[Row], verdicts: Seq[Verdict]) -> Features:
        features = kept(worker, rows, verdicts)
        found.append((features.table_M4, features.states_NF.cpu().numpy().copy()))
        return features

    with mock.patch.object(TargetWorker, "kept_features", watched):
        yield found


def test_the_draft_is_fed_the_features_of_these_forwards(target: Path, tmp_path: Path) -> None:
    made = synthetic.recurrent(target)
    speculative = {"method": made.method, "model": str(made.write(tmp_path / "draft")), "num_speculative_tokens": 2}
    with recorded_features() as of_graphs:
        found = served(target, BIAS, speculative_config=speculative)
    with recorded_features() as of_layers:
        ordinary = generate(target, PROMPTS, BIAS, max_model_len=64, speculative_config=speculative)
    assert found.outputs == ordinary.outputs
    assert len(of_graphs) == len(of_layers) > 2
    for (table_M4, states_NF), (other_M4, other_NF) in zip(of_graphs, of_layers, strict=True):
        assert table_M4.tolist() == other_M4.tolist() and len(states_NF)
        np.testing.assert_allclose(states_NF, other_NF, rtol=1e-3, atol=1e-4)


def test_steps_are_measured_by_the_forwards_that_serve(target: Path) -> None:
    """Of more tokens than there are slots, rows feed several."""
    found = list[tuple[int, int, bool]]()
    run = ForwardGraphs.run

    def watched(graphs: ForwardGraphs, batch: Batch, wanted_N: Ints) -> Outputs | None:
        outputs = run(graphs, batch, wanted_N)
        found.append((len(batch.tokens_T), len(batch.slots_R), outputs is not None))
        return outputs

    speculative = {"method": "ngram", "num_speculative_tokens": 2, "policy": "adaptive"}
    with mock.patch.object(ForwardGraphs, "run", watched):
        served(target, GREEDY, speculative_config=speculative)
    measured = found[: 3 * 5]  # three times each
    assert {each[:2] for each in measured} == {(16, 3), (8, 3), (4, 3), (2, 2), (1, 1)}
    assert all(is_captured for *_, is_captured in measured)


def test_sizes() -> None:
    assert forward_sizes(8, 64) == [ForwardSize(64, 8, 64), ForwardSize(32, 8, 32), ForwardSize(16, 8, 16)]
    assert forward_sizes(1000, 1 << 20)[0] == ForwardSize(2048, 256, 256)
    assert [size.tokens for size in forward_sizes(8, 40)] == [40, 32, 16]
    assert forward_sizes(8, 5) == [ForwardSize(5, 5, 5)]
