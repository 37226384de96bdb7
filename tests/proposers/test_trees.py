"""Trees, from the draft to the committed tokens: the same tokens as without, whatever the trees look like."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import assemble
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from slipstream import LLM
from tests.support.distributed.engine import Engine, configure
from tests.support.identity import Reference, assert_identical
from tests.support.models import tiny_pairs
from tests.support.models.tiny_models import build
from tests.support.policies import always
from tests.support.tree_proposer import TreeProposer, WorkerTreeProposer
from workers.draft.worker import DraftWorker
from workers.sampling.sampler import Sampler
from workers.target import TargetWorker

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
            request_id=str(i),
            prompt_token_ids=prompt(i),
            sampling=sampling,
            max_tokens=tokens + 3 * i,
            params=SamplingParams(stop_token_ids=sampling.stop_ids),
        )
        for i, sampling in enumerate(samplings())
    ]


class Told:
    """Run an engine; return all outputs of each request."""

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
    """An engine in this process, with a proposer in the controller, or with a copy of the target as its draft."""
    speculative: dict[str, Any] | None = None if proposer is None else NGRAM
    if isinstance(proposer, WorkerTreeProposer):
        speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": K}
    config = configure((model, model), draft=False, **{**TIGHT, "speculative_config": speculative, **arguments})
    with planted(proposer):
        return Engine(assemble.build(config, LocalInbox(), lambda line: None))


@contextmanager
def planted(proposer: TreeProposer | None) -> Iterator[None]:
    """Replace the proposer of engines built within this block."""

    def on_worker(_config: Any, runner: DraftWorker) -> TreeProposer | None:
        if isinstance(proposer, WorkerTreeProposer):
            proposer.runner = runner
        return proposer

    with pytest.MonkeyPatch.context() as patch:
        if isinstance(proposer, WorkerTreeProposer):
            patch.setattr("proposers.draft_model.DraftModelProposer.create", on_worker)
        elif proposer is not None:
            patch.setattr("proposers.ngram.NgramProposer.create", lambda *_: proposer)
        yield


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
    assert_identical(
        [request.prompt_token_ids for request in greedy],
        [on.outputs[request.request_id] for request in greedy],
        [off.outputs[request.request_id] for request in greedy],
        Reference(model),
    )
    assert on.outputs == off.outputs
    assert_same_logprobs(on, off)


def test_trees_of_more_nodes_than_a_chunk_has_tokens(tmp_path: Path) -> None:
    model = build("gemma2", tmp_path / "target", vocab_size=VOCAB)
    asked = requests(60)
    off = Told(alone(model, None), asked)
    speculative = {**NGRAM, "num_speculative_tokens": 64}
    roomy = {"num_gpu_blocks_override": 200, "max_num_batched_tokens": 200, "max_model_len": 256}
    on = Told(alone(model, TreeProposer(off.texts, VOCAB), speculative_config=speculative, **roomy), asked)
    assert max(len(row.draft) for plan, _ in on.rounds for row in plan.rows if row.draft) > 32
    assert on.outputs == off.outputs
    assert_walked(on)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("llama"), vocab_size=VOCAB)


def test_trees_of_a_worker_say_the_same_and_leave_its_own_cache_right(llama: Path) -> None:
    asked = requests(24)
    off = Told(alone(llama, None), asked)
    proposer = WorkerTreeProposer(off.texts, VOCAB)
    on = Told(alone(llama, proposer), asked)
    assert on.outputs == off.outputs
    assert_walked(on)
    generations: dict[int, int] = {}
    chains = []
    for plan, verdicts in on.rounds:
        generations |= {new.slot: new.generation for new in plan.new}
        known = {row.slot: (generations[row.slot], row.known_len) for row in plan.rows}
        chains += [verdict for verdict in verdicts if known[verdict.slot] in proposer.modelled]
    assert sum(verdict.proposed for verdict in chains) > 20
    assert all(len(verdict.path) == verdict.proposed for verdict in chains)  # the draft is the target


def greedy(name: str, prompt_token_ids: Sequence[int], tokens: int = 50) -> Request:
    return Request(name, tuple(prompt_token_ids), SamplingParams(), Sampling(0, 0.0), tokens)


def lost(_worker: TargetWorker, moves: Sequence[int]) -> None:
    """Make no move."""


def swapped(worker: TargetWorker, moves: Sequence[int]) -> None:
    """Make every move the wrong way."""
    worker.runner.cache.move(np.array(moves, np.int64).reshape(-1, 2)[:, ::-1].copy())


@pytest.mark.parametrize("sabotage", [lost, swapped])
def test_wrong_moves_would_be_noticed(
    llama: Path, sabotage: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [greedy(str(i), prompt(i)) for i in range(3)]
    off = Told(alone(llama, None), asked)
    assert Told(alone(llama, TreeProposer(off.texts, VOCAB)), asked).outputs == off.outputs
    monkeypatch.setattr(TargetWorker, "move", sabotage)
    on = Told(alone(llama, TreeProposer(off.texts, VOCAB)), asked)
    assert sum(len(plan.moves) for plan, _ in on.rounds) > 10
    assert on.outputs != off.outputs


def test_a_text_that_ended_in_a_tree_is_found_in_the_prefix_cache_as_it_should_be(llama: Path) -> None:
    first = greedy("first", prompt(1), 41)
    off = Told(alone(llama, None), [first])
    asked = [first, greedy("second", [*off.texts[0], 5, 6], 30)]
    wanted = Told(alone(llama, None, num_gpu_blocks_override=64), [asked[1]])
    engine = alone(llama, TreeProposer([*off.texts, *wanted.texts], VOCAB), num_gpu_blocks_override=64)
    engine.put(first)
    engine.finish()
    told = Told(engine, [asked[1]])
    assert told.outputs["second"] == wanted.outputs["second"]
    assert told.stats.prefix_hits > len(first.prompt_token_ids) + 20
    assert_walked(told)


def test_stop_strings_end_texts_at_the_same_character(tmp_path: Path) -> None:
    model, _ = tiny_pairs.build(tmp_path, "llama")
    prompts = [{"prompt_token_ids": list(prompt(i))} for i in range(4)]
    arguments: dict[str, Any] = {"model": str(model), "dtype": "float32", "enforce_eager": True, "max_model_len": 128}
    with LLM(**arguments) as llm:
        longest = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        stops = [result.outputs[0].text[20 + i : 22 + i] for i, result in enumerate(longest)]
        asked = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, stop=stop) for stop in stops]
        off = [result.outputs[0] for result in llm.generate(prompts, asked)]
    texts = [
        [*given["prompt_token_ids"], *result.outputs[0].token_ids]
        for given, result in zip(prompts, longest, strict=True)
    ]
    with planted(TreeProposer(texts, 259)), LLM(**arguments, speculative_config=always(NGRAM)) as llm:
        on = [result.outputs[0] for result in llm.generate(prompts, asked)]
        stats = llm.stats()
    assert [(ours.text, ours.finish_reason, ours.token_ids) for ours in on] == [
        (theirs.text, theirs.finish_reason, theirs.token_ids) for theirs in off
    ]
    assert {output.finish_reason for output in off} == {"stop"}
    assert stats.proposed > stats.accepted > 0


def test_chains_are_sampled_in_one_call_a_round(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.verification.acceptance.TreeSampler", None)
    calls: list[int] = []
    sample = Sampler.sample

    def counting(self: Sampler, logits: Any, slots: Any, index: Any) -> Any:
        calls.append(len(slots))
        return sample(self, logits, slots, index)

    monkeypatch.setattr(Sampler, "sample", counting)
    asked = [greedy(str(i), [7, 11, 30] * 5, 20) for i in range(3)]
    config = configure((llama, llama), draft=False, speculative_config=NGRAM)
    told = Told(Engine(assemble.build(config, LocalInbox(), lambda line: None)), asked)
    assert told.stats.proposed > 0
    assert len(calls) == len(told.rounds)
