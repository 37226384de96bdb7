"""Trees, from the draft to the committed tokens: the same tokens as without, whatever the trees look like."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from protos.messages import Request, RoundPlan, Sampling, Verdict
from protos.sampling import SamplingParams
from runtime.controller import LocalInbox
from tests.gang_engine import Engine, configure
from tests.identity import Reference, assert_identical
from tests.tiny_models import build
from tests.tree_proposer import TreeProposer

VOCAB = 97
K = 7
FAMILIES = ("llama", "gemma2", "gpt_oss", "gpt2", "mixtral")
"""Plain; sliding windows and caps; sinks; learned positions; experts."""
SHARED = tuple(random.Random(3).randrange(3, 90) for _ in range(18))
TIGHT: dict[str, Any] = {"num_gpu_blocks_override": 34, "max_num_seqs": 6, "max_num_batched_tokens": 22}
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def prompt(i: int) -> tuple[int, ...]:
    rest = tuple(random.Random(i).randrange(3, 90) for _ in range(3 + 7 * (i % 4)))
    return SHARED + rest if i % 2 else rest


def samplings() -> list[Sampling]:
    """One of every kind of request."""
    drawn: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95}
    return [
        Sampling(0, 0.0),
        Sampling(1, 0.0, logprobs=2),
        Sampling(2, 0.0, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.4, logprobs=0),
        Sampling(3, **drawn),
        Sampling(4, **drawn, repetition_penalty=1.2, presence_penalty=0.2, frequency_penalty=0.3),
        Sampling(5, **drawn, logprobs=1, prompt_logprobs=1),
        Sampling(6, 0.0, bad_words=((5,), (7, 9), *((a, b) for a in range(20, 50) for b in range(40, 90, 7)))),
        Sampling(7, **drawn, min_tokens=9, stop_ids=tuple(range(10, 40))),
    ]


def requests(tokens: int) -> list[Request]:
    return [
        Request(
            request_id=str(i), prompt_token_ids=prompt(i), sampling=sampling, max_tokens=tokens + 3 * i,
            params=SamplingParams(stop_token_ids=sampling.stop_ids),
        )
        for i, sampling in enumerate(samplings())
    ]  # fmt: skip


class Told:
    """Everything that an engine said of each request."""

    def __init__(self, engine: Engine, asked: Sequence[Request]) -> None:
        self.asked = asked
        step, self.logprobs = engine.built.controller.step, {}

        def listening() -> list[Any]:
            outputs = step()
            for output in outputs:
                entries = [*(output.prompt_logprobs or ()), *(output.logprobs or ())]
                self.logprobs.setdefault(output.request_id, []).extend(entries)
            return outputs

        engine.built.controller.step = listening  # type: ignore[method-assign]
        engine.put(*asked)
        self.outputs = engine.finish()
        self.stats = engine.built.controller.stats()
        self.rounds = engine.rounds
        engine.built.shutdown()

    @property
    def texts(self) -> list[list[int]]:
        return [[*request.prompt_token_ids, *self.outputs[request.request_id]] for request in self.asked]


def alone(model: Path, proposer: TreeProposer | None, **arguments: Any) -> Engine:
    """An engine in this process, with a proposer beside the controller."""
    config = configure((model, model), draft=False, speculative_config=None if proposer is None else NGRAM,
                       **{**TIGHT, **arguments})  # fmt: skip
    return Engine(_assembled(config, proposer))


def _assembled(config: Any, proposer: TreeProposer | None, make: Any = None) -> assemble.Assembled:
    with pytest.MonkeyPatch.context() as patch:
        if proposer is not None:
            patch.setattr("proposers.ngram.NgramProposer.create", lambda *_: proposer)
        return assemble.build(config, LocalInbox(), lambda line: None, make)


def assert_same_logprobs(ours: Told, theirs: Told) -> None:
    assert ours.logprobs.keys() == theirs.logprobs.keys()
    for name, entries in ours.logprobs.items():
        for mine, other in zip(entries, theirs.logprobs[name], strict=True):
            assert mine.token_ids[0] == other.token_ids[0]
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def assert_walked(told: Told) -> None:
    """Branches were taken: paths that no chain has; and something was proposed in vain."""
    paths = [list(verdict.path) for _, verdicts in told.rounds for verdict in verdicts]
    assert any(path != list(range(len(path))) for path in paths)
    assert sum(len(plan.moves) for plan, _ in told.rounds) > 0
    assert any(verdict.probed for _, verdicts in told.rounds for verdict in verdicts)
    assert told.stats.proposed > told.stats.accepted > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_say_what_is_said_without_them(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path / "target", vocab_size=VOCAB)
    asked = requests(24)
    off = Told(alone(model, None), asked)
    assert (off.stats.proposed, off.stats.preemptions > 0) == (0, True)
    on = Told(alone(model, TreeProposer(off.texts, VOCAB)), asked)
    assert on.stats.preemptions > 0
    assert_walked(on)
    greedy = [request for request in asked if request.sampling == Sampling(request.sampling.seed, 0.0)]
    assert_identical([request.prompt_token_ids for request in greedy],
                     [on.outputs[request.request_id] for request in greedy],
                     [off.outputs[request.request_id] for request in greedy], Reference(model))
    assert on.outputs == off.outputs
    assert_same_logprobs(on, off)
