"""Rejection sampling on whole engines: what it must not change, and its failures.

`tests.workers.verification.test_rejection_math` proves that the output has the target's distribution; the exactness
suite measures it.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import assemble
from protos.draft import Draft
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from tests.support.distributed.engine import Engine, configure, late_comer, threaded
from tests.support.models import synthetic_layers, tiny_models
from workers.draft.worker import DraftWorker
from workers.verification.draft_probs import DraftProbs
from workers.verification.rejection import RejectionSampler

VOCAB = 23
ROOM: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
RULES = ("standard", "block")
Outputs = dict[str, list[int]]


@dataclass(frozen=True)
class Models:
    """A target, drafts for it, and its outputs without a draft."""

    target: Path
    draft: Path
    eagle3: Path
    plain: Outputs

    def speculative(self, kind: str, **options: Any) -> dict[str, Any]:
        """What is asked of `speculative_config` for one kind of draft."""
        kinds: dict[str, dict[str, Any]] = {
            "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
            "draft_model": {"method": "draft_model", "model": str(self.draft), "num_speculative_tokens": 3},
            "chain": {"method": "eagle3", "model": str(self.eagle3), "num_speculative_tokens": 3},
            "lookahead": {
                "method": "lookahead",
                "num_speculative_tokens": 12,
                "lookahead_window": 3,
                "lookahead_ngram": 3,
                "lookahead_guesses": 3,
            },
            "tree": {"method": "eagle3", "model": str(self.eagle3), "num_speculative_tokens": 7, "draft_shape": "tree"},
        }
        return {**kinds[kind], **options}


def requests(count: int = 8) -> list[Request]:
    """Greedy and seeded rows by turns, some with options; one asks for log-probabilities."""
    return [
        Request(
            request_id=str(i),
            params=SamplingParams(),
            max_tokens=16 + i % 3,
            prompt_token_ids=tuple(3 + (i * j + j * j) % 20 for j in range(2 + 3 * i % 11)),
            sampling=Sampling(
                seed=i,
                temperature=0.9 * (i % 2),
                presence_penalty=0.5 * (i % 3 == 0),
                top_p=0.9 if i % 5 == 0 else 1.0,
                logprobs=1 if i in {2, 3} else None,
            ),
        )
        for i in range(count)
    ]


GREEDY = [request.request_id for request in requests() if not request.sampling.temperature]


def started(models: Models, speculative: dict[str, Any] | None, **arguments: Any) -> Engine:
    config = configure((models.target, models.target), speculative_config=speculative, **{**ROOM, **arguments})
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    target = tiny_models.build("llama", root / "target", vocab_size=VOCAB)
    draft = tiny_models.perturb(target, root / "draft")
    eagle3 = synthetic_layers.eagle3(target, kept=None).write(root / "eagle3")
    return Models(target, draft, eagle3, run(started(Models(target, draft, eagle3, {}), None)))


def run(engine: Engine) -> Outputs:
    """What comes of all `requests`."""
    engine.put(*requests())
    outputs = engine.finish()
    engine.built.shutdown()
    return outputs


def assert_greedy_rows_are_plain(outputs: Outputs, models: Models) -> None:
    """Greedy rows have the same output as without a draft; all rows have the full length."""
    assert {name: outputs[name] for name in GREEDY} == {name: models.plain[name] for name in GREEDY}
    assert {name: len(ids) for name, ids in outputs.items()} == {name: len(ids) for name, ids in models.plain.items()}


@pytest.mark.parametrize("kind", ["ngram", "lookahead", "draft_model", "chain", "tree"])
@pytest.mark.parametrize("rule", RULES)
def test_in_one_process(rule: str, kind: str, models: Models, caplog: pytest.LogCaptureFixture) -> None:
    engine = started(models, models.speculative(kind, rejection_sample_method=rule))
    outputs = run(engine)
    assert_greedy_rows_are_plain(outputs, models)
    assert engine.proposed() > engine.accepted > 0
    assert seeded_accepted(engine) > 0
    assert "draft" not in caplog.text
    with_logprobs = [verdict for _, verdicts in engine.rounds for verdict in verdicts if verdict.logprobs is not None]
    assert any(verdict.path for verdict in with_logprobs)
    for verdict in with_logprobs:
        assert [each.token_ids[0] for each in verdict.logprobs or ()] == list(verdict.token_ids)


@pytest.mark.parametrize("rule", RULES)
def test_without_a_draft_every_token_is_what_it_is_without_speculation(rule: str, models: Models) -> None:
    off = models.speculative(
        "draft_model", rejection_sample_method=rule, num_speculative_tokens_per_batch_size=[[1, 99, 0]]
    )
    engine = started(models, off)
    assert run(engine) == models.plain
    assert engine.proposed() == 0


def test_a_greedy_draft_is_certain_of_its_draft_tokens(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    accept = RejectionSampler.accept
    monkeypatch.setattr(
        RejectionSampler, "accept", lambda self, scored: seen.append(len(scored.draft_probs)) or accept(self, scored)
    )
    engine = started(
        models, models.speculative("tree", rejection_sample_method="standard", draft_sample_method="greedy")
    )
    assert_greedy_rows_are_plain(run(engine), models)
    assert engine.proposed() > engine.accepted > 0
    assert set(seen) == {0}


def broken(probs: DraftProbs) -> list[DraftProbs]:
    """Laws that make no sense, each in its own way."""
    twice, unknown, no_number = (DraftProbs(probs.ids_ML.copy(), probs.q_ML.copy()) for _ in range(3))
    twice.ids_ML[0, 1] = twice.ids_ML[0, 0]
    unknown.ids_ML[0, 0] = VOCAB
    no_number.q_ML[0, 0] = np.nan
    return [
        twice,
        unknown,
        no_number,
        DraftProbs(probs.ids_ML[:0], probs.q_ML[:0]),
        DraftProbs(probs.ids_ML[:, :1], probs.q_ML),
    ]


@pytest.mark.parametrize("fault", [*range(5), None])
def test_distributions_that_are_missing_or_make_no_sense_cost_draft_tokens_alone(
    fault: int | None, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then every row goes on as without a draft."""
    draft_probs = DraftWorker.draft_probs

    def sent(worker: DraftWorker, slots: Sequence[int], drafts: Sequence[Draft]) -> dict[int, DraftProbs]:
        found = draft_probs(worker, slots, drafts)
        return {slot: broken(each)[fault] for slot, each in found.items() if fault is not None}

    monkeypatch.setattr(DraftWorker, "draft_probs", sent)
    engine = started(models, models.speculative("tree", rejection_sample_method="standard"))
    assert run(engine) == models.plain
    assert engine.proposed() > engine.accepted > 0  # greedy rows need no distributions


@pytest.mark.parametrize("kind", ["draft_model", "tree"])
def test_on_a_worker_group_with_a_draft_of_its_own_that_dies_and_comes_back(
    kind: str, models: Models, running: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    may_come = threading.Event()
    rule = "standard" if kind == "tree" else "block"
    options = models.speculative(kind, rejection_sample_method=rule, placement="dedicated")
    config = configure((models.target, models.target), tensor_parallel_size=2, speculative_config=options, **ROOM)
    engine = threaded(config, body=late_comer(may_come))
    running.append(engine)
    assert engine.workers is not None
    rows = requests()
    engine.put(*rows[:4])
    engine.until(lambda: seeded_accepted(engine) > 0)
    engine.workers.newest("draft").crash()
    engine.until(lambda: not engine.built.executor.drafting.is_up)
    may_come.set()
    engine.until_drafting(epoch=2)
    again = seeded_accepted(engine)
    engine.finish()
    engine.put(*rows[4:])
    outputs = engine.finish()
    assert_greedy_rows_are_plain(outputs, models)
    assert seeded_accepted(engine) > again > 0  # so distributions were sent, before and after
    assert "the draft failed" not in caplog.text


def seeded_accepted(engine: Engine) -> int:
    """Guesses that were kept of rows with a temperature."""
    total, seeded = 0, dict[int, bool]()
    for plan, verdicts in engine.rounds:
        seeded |= {new.slot: new.sampling.temperature > 0 for new in plan.new}
        total += sum(len(verdict.path) for verdict in verdicts if seeded[verdict.slot])
    return total


def test_on_a_worker_group_beside_the_first_rank(models: Models, running: list[Engine]) -> None:
    options = models.speculative("draft_model", rejection_sample_method="standard", placement="colocated")
    config = configure((models.target, models.target), tensor_parallel_size=2, speculative_config=options, **ROOM)
    engine = threaded(config)
    running.append(engine)
    engine.put(*requests())
    assert_greedy_rows_are_plain(engine.finish(), models)
    assert seeded_accepted(engine) > 0


# Rates that are given.


def kept_at_each_depth(engine: Engine) -> tuple[list[int], int]:
    """How often a draft token was accepted at each depth, and how often there were three."""
    whole = [verdict for _, verdicts in engine.rounds for verdict in verdicts if verdict.proposed == 3]
    return [sum(len(verdict.path) > depth for verdict in whole) for depth in range(3)], len(whole)


@pytest.mark.parametrize(
    ("rates", "share"), [([1.0, 1.0, 1.0], [1, 1, 1]), ([0.0, 0.0, 0.0], [0, 0, 0]), ([1.0, 1.0, 0.0], [1, 1, 0])]
)
def test_synthetic_keeps_what_it_is_told_to(rates: list[float], share: list[int], models: Models) -> None:
    engine = started(
        models, models.speculative("draft_model", rejection_sample_method="synthetic", synthetic_acceptance_rates=rates)
    )
    outputs = run(engine)
    kept, rounds = kept_at_each_depth(engine)
    assert rounds > 20
    assert kept == [rounds * each for each in share]
    assert (outputs == models.plain) == (share[0] == 0)


def test_synthetic_rates_are_met_on_average(models: Models) -> None:
    """Of at least 60 rounds; five standard deviations, a false-alarm rate below 1e-6, with seeds that are settled."""
    engine = started(
        models, models.speculative("draft_model", rejection_sample_method="synthetic", synthetic_acceptance_length=1.5)
    )
    run(engine)
    (first, *others), rounds = kept_at_each_depth(engine)
    assert rounds >= 60
    assert abs(first / rounds - 0.5) < 5 * (0.25 / rounds) ** 0.5
    assert others == [0, 0]
