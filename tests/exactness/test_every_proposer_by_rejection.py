"""Every proposer on a draft worker, with rejection sampling: tokens have the target's distribution.

The reference is `transformers`: its distribution after every text. All tests of this file together raise a false
alarm with probability 1e-6 at most, and seeds are fixed. Full: each case and shape under both rules, 20,000 texts of
three tokens, which detect a total variation of 2 %, equal after all texts, in 97 of 100 cases
(`tests.support.exactness.statistics.power`); quick: 100 texts of some that
`tests.workers.verification.test_rejection_engine` leaves out.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from tests.proposers.test_every_proposer import CASES, VOCAB, Case, Folders, requests, started
from tests.support.distributed.engine import Engine
from tests.support.exactness.statistics import Finding, Ints, Probs, compare, counted

RULES = ("standard", "block")
PROMPT = (3, 9, 4, 9, 5)
LENGTH = 3
QUICK, FULL = 100, 20_000
NUM_TESTS = 100
"""A bound on the number of tests, quick and full together."""
MANY = {"max_num_seqs": 64, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 2000}
NAMED = {case.name: case for case in CASES}


@dataclass(frozen=True)
class Cell:
    """A kind of draft, its shape and the acceptance rule."""

    name: str
    shape: str
    rule: str

    def __str__(self) -> str:
        return f"{self.name}, {self.shape}, {self.rule}"

    @property
    def case(self) -> Case:
        """The kind."""
        return NAMED[self.name]

    def started(self, folders: Folders) -> Engine:
        """An engine with this kind of draft."""
        asked = folders.speculative(self.case, **self.case.shapes[self.shape], rejection_sample_method=self.rule)
        return started(folders.of(self.case), asked, **MANY)


EVERY = [Cell(case.name, shape, rule) for case in CASES for shape in case.shapes for rule in RULES]
SOME = [
    Cell("hydra", "tree", "standard"),
    Cell("recurrent", "tree", "block"),
    Cell("p_eagle", "chain", "block"),
    Cell("mtp_mimo", "chain", "standard"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("models"))


def sampled(count: int) -> list[Request]:
    """The same prompt *count* times, with a seed each."""
    return [
        Request(
            request_id=f"seed {i}",
            params=SamplingParams(),
            max_tokens=LENGTH,
            prompt_token_ids=PROMPT,
            sampling=Sampling(seed=i),
        )
        for i in range(count)
    ]


def distributions_after(folder: Path, family: str, texts: list[tuple[int, ...]]) -> Probs:
    """Return the logits of `transformers` after *texts* of one length, `[C, V]`."""
    told = json.loads((folder / "config.json").read_text())
    plain = {key: value for key, value in told.items() if key not in {"model_type", "auto_map"}}
    config = AutoConfig.for_model(family, **plain)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    with torch.inference_mode():
        found: Probs = model(torch.tensor(texts)).logits[:, -1].double().softmax(-1).numpy()
    return found


def judged(folder: Path, family: str, texts_NL: Ints) -> Finding:
    """Compare each token with the distribution after the text before it."""
    counts, distributions = [], []
    for place in range(LENGTH):
        before, context_N = np.unique(texts_NL[:, :place], axis=0, return_inverse=True)
        counts.append(counted(context_N.ravel(), texts_NL[:, place], (len(before), VOCAB)))
        distributions.append(distributions_after(folder, family, [(*PROMPT, *map(int, text)) for text in before]))
    return compare(np.concatenate(counts), np.concatenate(distributions))


def check(cell: Cell, folders: Folders, running: list[Engine], count: int) -> None:
    """Sample *count* texts; check that greedy rows equal those of a run alone."""
    folder = folders.of(cell.case)
    engine = cell.started(folders)
    running.append(engine)
    engine.put(*sampled(count))
    outputs = engine.finish()
    assert engine.proposed() > engine.accepted > 0
    finding = judged(folder, cell.case.family, np.array([outputs[f"seed {i}"] for i in range(count)]))
    assert not finding.is_wrong(NUM_TESTS), f"{cell}: {finding}"
    greedy = [request for request in requests() if not request.sampling.temperature]
    engine.put(*greedy)
    outputs, plain = engine.finish(), folders.plain(folder)
    assert {row.request_id: outputs[row.request_id] for row in greedy} == {
        row.request_id: plain[row.request_id] for row in greedy
    }


@pytest.fixture(autouse=True)
def _no_draft_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert "the draft failed" not in caplog.text


@pytest.mark.parametrize("cell", SOME, ids=str)
def test_some(cell: Cell, folders: Folders, running: list[Engine]) -> None:
    check(cell, folders, running, QUICK)


@pytest.mark.full
@pytest.mark.parametrize("cell", EVERY, ids=str)
def test_each(cell: Cell, folders: Folders, running: list[Engine]) -> None:
    check(cell, folders, running, FULL)


def test_there_are_no_more_tests_than_were_allowed_for() -> None:
    assert len(SOME) + len(EVERY) <= NUM_TESTS
