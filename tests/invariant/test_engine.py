"""Whole engines under `batch_invariant`, in bf16: exactly the same tokens, greedy and seeded."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from benchmarks import invariance
from cluster import assemble
from protos.config.arguments import parse
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from tests.support.distributed.engine import Engine, configure, quick_turns, threaded
from tests.support.models import synthetic_layers
from tests.support.models.tiny_models import build, perturb

VOCAB = 97
ROOM: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 600}
EXACTLY: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True}
Outputs = dict[str, list[int]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("target"), vocab_size=VOCAB)


def requests() -> list[Request]:
    """Greedy and seeded rows in turn, with shared prefixes; some are repetitive, so that n-grams match."""
    shared = [11, 12, 13, 14, 15, 16, 17, 18, 19]
    return [
        Request(
            request_id=str(i),
            params=SamplingParams(),
            max_tokens=12 + i % 7,
            prompt_token_ids=(*shared * (i % 2), *[5, 6, 7, 8 + i % 5] * (2 + i % 6)),
            sampling=Sampling(seed=i, temperature=0.9 * (i % 2)),
        )
        for i in range(20)
    ]


def run(target: Path, speculative: dict[str, Any] | None, **options: Any) -> tuple[Outputs, Engine]:
    """Return the outputs of one process for all requests at once, and the engine, which has shut down."""
    config = configure((target, target), **{"speculative_config": speculative, **ROOM, **EXACTLY, **options})
    engine = Engine(assemble.build(config, LocalInbox(), report=lambda line: None))
    engine.put(*requests())
    outputs = engine.finish()
    engine.built.shutdown()
    return outputs, engine


@pytest.fixture(scope="module")
def alone(target: Path) -> Outputs:
    """Outputs for one request after another, without speculation or prefix caching, prompts in one chunk."""
    outputs, engine = run(target, None, max_num_seqs=1, enable_prefix_caching=False)
    assert engine.proposed() == 0
    return outputs


@pytest.fixture(params=["off", "ngram", "draft_model", "eagle3 tree"])
def speculative(request: pytest.FixtureRequest, target: Path, tmp_path: Path) -> dict[str, Any] | None:
    if request.param == "off":
        return None
    if request.param == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
    if request.param == "eagle3 tree":
        head = synthetic_layers.eagle3(target, kept=12).write(tmp_path)
        return {"method": "eagle3", "model": str(head), "num_speculative_tokens": 9, "draft_shape": "tree"}
    return {"method": "draft_model", "model": str(perturb(target, tmp_path)), "num_speculative_tokens": 3}


def test_in_one_process(target: Path, alone: Outputs, speculative: dict[str, Any] | None) -> None:
    outputs, engine = run(target, speculative)
    assert outputs == alone
    assert (engine.proposed() > engine.accepted > 0) == (speculative is not None)


@pytest.fixture
def _turns() -> Iterator[None]:
    with quick_turns():
        yield


@pytest.mark.usefixtures("_turns")
def test_on_two_ranks_with_a_draft_of_its_own(target: Path, alone: Outputs, tmp_path: Path) -> None:
    draft = {"model": str(perturb(target, tmp_path)), "num_speculative_tokens": 3, "placement": "dedicated"}
    config = configure((target, target), tensor_parallel_size=2, speculative_config=draft, **ROOM, **EXACTLY)
    engine = threaded(config)
    engine.put(*requests())
    outputs = engine.finish()
    engine.built.shutdown()
    assert outputs == alone
    assert engine.proposed() > engine.accepted > 0


def test_the_draft_is_not_held_to_it(target: Path, tmp_path: Path) -> None:
    """The draft itself need not be batch-invariant."""
    from workers.draft.load import _model_of, speculation_of

    config = configure((target, perturb(target, tmp_path)), **EXACTLY)
    assert config.model.batch_invariant
    assert not _model_of(config, speculation_of(config)).batch_invariant


@pytest.mark.parametrize("given", [{"batch_invariant": True}, {"batch-invariant": "true"}, {"--batch-invariant": True}])
def test_it_is_an_argument_like_any_other(given: dict[str, Any]) -> None:
    assert parse({"model": "m", **given}).model.batch_invariant
    assert not parse({"model": "m"}).model.batch_invariant


class _Echo:
    """Stands for an engine of `benchmarks.invariance`: returns the number of each prompt, and records it by kind."""

    seeds: ClassVar[dict[tuple[str, int, str], list[int]]] = {}

    def __init__(self, _target: Path, speculative_config: dict[str, Any] | None = None, **options: Any) -> None:
        self.llm = self
        self._method = (speculative_config or {}).get("method", "model" if speculative_config else "off")
        self._is_reference = "enable_prefix_caching" in options

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def stats(self) -> Any:
        return SimpleNamespace(proposed=0, accepted=0)

    def generate(
        self, texts: list[list[int]], seeds: Sequence[int], tokens: int, kind: str, batch: int
    ) -> list[list[int]]:
        if not self._is_reference:
            self.seeds.setdefault((self._method, batch, kind), []).extend(seeds)
        return [[seed, *ids[:tokens]] for seed, ids in zip(seeds, texts, strict=True)]


def test_all_turns_are_all_prompts_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [str(turn) for turn in range(12)]
    monkeypatch.setattr("sys.argv", ["invariance", "--share", "5", "--turns", *turns])
    monkeypatch.setattr(invariance, "TokenEngine", _Echo)
    cells = list(invariance.Identity(invariance.arguments(), is_on=True, count=58).cells([invariance.UNI]))
    assert len(cells) == 12 * 24
    assert not any(cell.differing for cell in cells)
    assert len(_Echo.seeds) == 24
    assert all(sorted(set(numbers)) == list(range(58)) for numbers in _Echo.seeds.values())


@pytest.mark.full
def test_the_demo_pair(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A small form of `python -m benchmarks.invariance`: every sequence, in every way but over Ray."""
    monkeypatch.setattr("sys.argv", ["invariance", "--tokens", "24", "--batches", "1", "7"])
    args = invariance.arguments()
    cells = list(invariance.Identity(args, is_on=True, count=8).cells([invariance.UNI]))
    assert len(cells) == 4 * 2 * 2
    assert all(cell.differing == 0 and cell.sequences == 8 for cell in cells), capsys.readouterr().out
    assert all(cell.proposed > cell.accepted > 0 for cell in cells if cell.proposer not in {"off", "ngram"})
