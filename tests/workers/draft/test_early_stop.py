"""Early stop: chains are cut after their first token of low confidence, and nothing else changes."""

from typing import Any

import numpy as np
import pytest
import torch

from protos.draft import Draft
from protos.messages import NewSequence, Sampling
from protos.sampling import SamplingParams
from runtime.policy.stopping import StoppingPolicy
from slipstream import LLM
from tests.conftest import ModelPair
from tests.proposers.test_every_proposer import CASES, Drafted, Folders, Options, requests, started
from tests.proposers.test_every_proposer import drafted as drafted  # noqa: PLC0414 - a fixture
from tests.proposers.test_every_proposer import folders as folders  # noqa: PLC0414 - a fixture
from tests.support.distributed.engine import Engine, configure, threaded
from tests.support.engine_arguments import speculative
from workers.draft.early_stop import FixedStop, by_probability, make_early_stop
from workers.draft.worker import DraftWorker
from workers.sampling.noise import gumbel, row_keys
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable

TOKEN_BY_TOKEN = [case for case in CASES if case.name in {"draft_model", "eagle", "eagle3", "mtp_deepseek"}]
THRESHOLD = 0.8
each = pytest.mark.parametrize("case", TOKEN_BY_TOKEN, ids=lambda case: case.name)


def chains(threshold: float | str | None) -> Options:
    options: Options = {"num_speculative_tokens": 5, "draft_shape": "chain"}
    return options if threshold is None else {**options, "assistant_confidence_threshold": threshold}


@pytest.mark.parametrize("threshold", [THRESHOLD, "auto"])
@each
def test_answers_are_the_same_and_chains_differ_in_length(
    case: Any,
    threshold: float | str,
    folders: Folders,
    running: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    *,
    drafted: Drafted,
) -> None:
    monkeypatch.setattr(StoppingPolicy, "_least", lambda *_: 0.3)
    engine = started(folders.of(case), folders.speculative(case, **chains(threshold)))
    running.append(engine)
    engine.put(*requests())
    assert engine.finish() == folders.plain(folders.of(case))
    assert engine.proposed() > engine.accepted > 0
    lengths = {len(draft) for row, draft in drafted if len(draft) and row.max_chain == 5}
    assert min(lengths) == 1 < max(lengths)
    stats = engine.built.controller.stats()
    assert stats.proposed < sum(row.max_chain for row, draft in drafted if len(draft))
    known = sum(row.length for plan, _ in engine.rounds for row in plan.rows)
    assert stats.fed_tokens == known + engine.proposed()


@each
def test_answers_are_the_same_with_trees_that_end_early(
    case: Any, folders: Folders, running: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = []
    grow = DraftWorker.grow
    monkeypatch.setattr(
        DraftWorker, "grow", lambda worker, rows, level: fed.append(len(level.row_N)) or grow(worker, rows, level)
    )
    counts = []
    for stop in ({}, {"assistant_confidence_threshold": 0.4}):
        fed.clear()
        engine = started(folders.of(case), folders.speculative(case, **case.shapes["tree"], **stop))
        running.append(engine)
        engine.put(*requests())
        assert engine.finish() == folders.plain(folders.of(case))
        assert engine.proposed() > engine.accepted > 0
        counts.append(sum(fed) / len(engine.rounds))
    assert counts[1] < 0.8 * counts[0]


@each
def test_a_chain_is_the_beginning_of_what_it_would_be(
    case: Any, folders: Folders, running: list[Engine], *, drafted: Drafted
) -> None:
    """In the first round that drafts: later ones begin elsewhere."""
    found: list[dict[int, Draft]] = []
    for threshold in (None, THRESHOLD):
        engine = started(folders.of(case), folders.speculative(case, **chains(threshold)))
        running.append(engine)
        drafted.clear()
        engine.put(*requests()[:8])
        engine.until(lambda engine=engine: engine.proposed() > 0)
        found.append({row.slot: draft for row, draft in drafted if len(draft)})
    whole, stopped = found
    assert whole.keys() == stopped.keys()
    assert all(whole[slot].first(len(draft)) == draft for slot, draft in stopped.items())
    assert sum(map(len, stopped.values())) < sum(map(len, whole.values()))


@pytest.mark.parametrize(("threshold", "length"), [(0.0, 5), (1.0, 1)])
def test_the_ends_of_the_range(
    threshold: float, length: int, folders: Folders, running: list[Engine], *, drafted: Drafted
) -> None:
    case = TOKEN_BY_TOKEN[-2]
    engine = started(folders.of(case), folders.speculative(case, **chains(threshold)))
    running.append(engine)
    engine.put(*requests()[:3])
    engine.finish()
    assert {len(draft) for row, draft in drafted if len(draft) and row.max_chain >= length} == {length}


def test_on_a_draft_worker_of_its_own(folders: Folders, running: list[Engine]) -> None:
    case = next(case for case in TOKEN_BY_TOKEN if case.name == "draft_model")
    asked = folders.speculative(case, **chains(0.5), placement="dedicated")
    models = (folders.of(case), folders.of(case))
    engine = threaded(configure(models, speculative_config=asked, max_num_seqs=8, num_gpu_blocks_override=200))
    running.append(engine)
    engine.put(*requests()[:6])
    outputs, plain = engine.finish(), folders.plain(folders.of(case))
    assert outputs == {name: plain[name] for name in outputs}
    assert engine.proposed() > engine.accepted > 0
    lengths = {verdict.proposed for _, verdicts in engine.rounds for verdict in verdicts if verdict.proposed}
    assert len(lengths) > 2


PROMPTS = ["def read_lines(path):\n", "class Stack:\n", "import os\n", "for i in range("]


def test_the_demo_draft_computes_fewer_tokens_of_which_about_as_many_are_accepted(demo_pair: ModelPair) -> None:
    params = [SamplingParams(temperature=i % 2, max_tokens=40, seed=i) for i in range(len(PROMPTS))]
    outputs, stats = [], []
    for threshold in (None, 0.2):
        keys = {"model": str(demo_pair.draft), "num_speculative_tokens": 8, "policy": "fixed"}
        asked = keys if threshold is None else {**keys, "assistant_confidence_threshold": threshold}
        with LLM(model=str(demo_pair.target), dtype="float32", enforce_eager=True, speculative_config=asked) as llm:
            results = llm.generate(PROMPTS, params, use_tqdm=False)
            stats.append(llm.stats())
        outputs.append([result.outputs[0].token_ids for result in results])
    whole, stopped = stats
    assert outputs[0] == outputs[1]
    assert stopped.proposed < 0.8 * whole.proposed
    assert stopped.accepted / stopped.drafting_rounds > 0.7 * whole.accepted / whole.drafting_rounds


def at_temperatures(*temperatures: float) -> Sampler:
    """Return a sampler with a sequence of each temperature."""
    slots = SlotTable(len(temperatures), 16, 4)
    for slot, temperature in enumerate(temperatures):
        slots._join(NewSequence(slot, (1, 2), 2, Sampling(slot, temperature), 1))
    return Sampler(slots, 6)


LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, 0.0, 0.3]]).repeat(2, 1)


def test_a_draft_without_the_targets_noise_is_as_confident_as_its_probabilities() -> None:
    found = by_probability(LOGITS, torch.tensor([0, 1]), np.array([0.0, 0.5], np.float32))
    wanted = [LOGITS[0].softmax(0)[0], (LOGITS[1] / 0.5).softmax(0)[1]]
    torch.testing.assert_close(found, torch.stack(wanted))


@pytest.mark.parametrize("rule", ["coupled", "standard"])
def test_the_noise_that_the_target_shares_counts(rule: str) -> None:
    sampler = at_temperatures(0.0, 0.5)
    slots_R, index_R = np.arange(2), np.array([2, 2])
    ids_R = sampler.sample(LOGITS, slots_R, index_R)
    stop = make_early_stop(
        speculative(model="d", assistant_confidence_threshold=0.5, rejection_sample_method=rule), sampler
    )
    assert stop is not None
    assert isinstance(stop.rule, FixedStop)
    assert stop.watch(LOGITS, ids_R, slots_R, index_R).tolist() == ids_R.tolist()
    noise_RV = gumbel(torch.from_numpy(row_keys(sampler.seeds(slots_R), index_R))[:, None], torch.arange(6))
    scores = [LOGITS[0].double(), LOGITS[1].double() / 0.5 + noise_RV[1] * (rule == "coupled")]
    wanted = [float(score.softmax(0)[token]) for score, token in zip(scores, ids_R.tolist(), strict=True)]
    np.testing.assert_allclose(stop.rule._newest_S, wanted, rtol=1e-5)
    assert stop.goes_on([0, 1]) == [confidence >= 0.5 for confidence in wanted]


def test_a_row_without_numbers_stops() -> None:
    sampler = at_temperatures(0.0)
    stop = make_early_stop(speculative(model="d", assistant_confidence_threshold=0.0), sampler)
    assert stop is not None
    stop.watch(torch.full((1, 6), torch.nan), torch.tensor([0]), np.array([0]), np.array([2]))
    assert stop.goes_on([0]) == [False]
