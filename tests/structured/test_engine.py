"""Structured outputs: as requested, and the same with every proposer, in a worker group, preempted or recomputed."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from protos.messages import Request
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from slipstream import LLM
from tests.conftest import ModelPair
from tests.support.distributed.engine import Engine, configure, threaded
from tests.support.structured import AMBIGUOUS, EOS, FORMS, tiny_models_in, tokenizer
from workers.sampling import grammar_slots

REPOSITORY = Path(__file__).parents[2]
Folders = dict[str, Path]
Options = dict[str, Any]
Answers = dict[str, list[int]]
ROOM: Options = {
    "max_num_seqs": 6,
    "max_num_batched_tokens": 96,
    "num_gpu_blocks_override": 300,
    "max_model_len": 200,
    "skip_tokenizer_init": False,
}
PROMPTS = ("name: ", "12 + a = ", "yes or no? name: ", "name: yes or no? ")
PENALISED: Options = {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "top_p": 0.95, "logit_bias": {40: 1.0}}
PATIENCE_S = 600.0
METHODS = ("ngram", "draft_model", "draft_model tree", "eagle3 tree")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return tiny_models_in(tmp_path_factory.mktemp("models"))


def speculation(folders: Folders, method: str) -> Options:
    """Return the `speculative_config`."""
    name, _, shape = method.partition(" ")
    looked_up = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if name == "ngram" else {}
    models = {"draft_model": {"model": str(folders["draft"])}, "eagle3": {"model": str(folders["eagle3"])}}
    shaped = {"num_speculative_tokens": 9, "draft_shape": "tree"} if shape else {"num_speculative_tokens": 3}
    return {"method": name, **looked_up, **models.get(name, {}), **shaped, "policy": "fixed"}


@dataclass(frozen=True)
class Ask:
    """Return a request; *form* names its structured output, if any."""

    prompt: str
    form: str | None
    params: SamplingParams


def wish(number: int, form: str | None, **options: Any) -> Ask:
    asked = None if form is None else FORMS[form].asked
    told = {"temperature": 1.0, "max_tokens": 60, "seed": number, "structured_outputs": asked, **options}
    return Ask(PROMPTS[number % len(PROMPTS)], form, SamplingParams(**told))


def wishes() -> list[Ask]:
    """Return requests of every form, sampled, greedy and with penalties, and some without a form."""
    kinds = ({}, {"temperature": 0.0, "max_tokens": 30}, PENALISED)
    return [wish(i, form, **kinds[i % 3]) for i, form in enumerate((*FORMS, None) * 2)]


def requests(engine: Engine, wanted: list[Ask]) -> list[Request]:
    make = engine.built.preprocessor.requests
    return [make(each.prompt, each.params, str(i))[0] for i, each in enumerate(wanted)]


def started(folders: Folders, speculative: Options | None, **options: Any) -> Engine:
    """An engine in one process."""
    config = configure((folders["target"], folders["target"]), speculative_config=speculative, **{**ROOM, **options})
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def finish(engine: Engine) -> Answers:
    """Drive an engine to the end, on however busy a machine."""
    engine.step()
    engine.until(lambda: not engine.built.controller.scheduler.num_unfinished, PATIENCE_S)
    return engine.finish()


@pytest.fixture(scope="module")
def plain(folders: Folders) -> Answers:
    """The expected outputs of every run, each in its form if it is complete."""
    engine = started(folders, None)
    engine.put(*requests(engine, wishes()))
    found = finish(engine)
    engine.built.shutdown()
    assert engine.proposed() == 0
    ended = [i for i, each in enumerate(wishes()) if each.form and engine.reasons[str(i)] == "stop"]
    assert len(ended) >= 6
    for i in ended:
        assert found[str(i)][-1] == EOS
        assert FORMS[wishes()[i].form or ""].is_met(tokenizer().decode(found[str(i)][:-1]))
    return found


def assert_same(engine: Engine, plain: Answers) -> None:
    engine.put(*requests(engine, wishes()))
    assert finish(engine) == plain
    assert engine.proposed() > engine.accepted > 0


@pytest.mark.parametrize("method", METHODS)
def test_every_proposer(method: str, folders: Folders, plain: Answers, running: list[Engine]) -> None:
    engine = started(folders, speculation(folders, method))
    running.append(engine)
    assert_same(engine, plain)
    paths = [list(verdict.path) for _, verdicts in engine.rounds for verdict in verdicts]
    assert any(path != list(range(len(path))) for path in paths) == method.endswith("tree")


@pytest.mark.parametrize("method", ["draft_model", "draft_model tree"])
def test_preempted(method: str, folders: Folders, plain: Answers, running: list[Engine]) -> None:
    engine = started(folders, speculation(folders, method), num_gpu_blocks_override=25, max_model_len=100)
    running.append(engine)
    assert_same(engine, plain)
    assert engine.built.controller.stats().preemptions > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model tree"])
def test_in_a_worker_group_that_loses_its_target(
    method: str, folders: Folders, plain: Answers, running: list[Engine]
) -> None:
    dedicated = {"placement": "dedicated"} if method != "ngram" else {}
    speculative = {**speculation(folders, method), **dedicated}
    engine = threaded(
        configure(
            (folders["target"], folders["target"]), speculative_config=speculative, tensor_parallel_size=2, **ROOM
        )
    )
    running.append(engine)
    assert engine.workers is not None
    engine.put(*requests(engine, wishes()))
    engine.until(lambda: engine.num_out >= 40, PATIENCE_S)
    engine.workers.newest("target").crash()
    engine.until(lambda: engine.built.controller.stats().target_losses == 1, PATIENCE_S)
    assert finish(engine) == plain
    assert engine.proposed() > engine.accepted > 0


def test_what_a_grammar_forbids_is_not_scored(
    folders: Folders, plain: Answers, running: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = partial(grammar_slots.FollowLimits, round_s=PATIENCE_S, patience_s=PATIENCE_S, draft_s=PATIENCE_S)
    monkeypatch.setattr(grammar_slots, "FollowLimits", patient)  # drafts that are pruned too late are left out
    scored = []  # accepted and proposed draft tokens
    for prunes in (True, False):
        running.append(engine := started(folders, speculation(folders, "draft_model")))
        if not prunes:
            monkeypatch.setattr(grammar_slots.SlotGrammars, "prune", lambda self, rows, drafts: drafts)
        assert_same(engine, plain)
        scored.append((engine.accepted, engine.proposed()))
    assert scored[0][0] == scored[1][0]
    assert scored[0][1] < scored[1][1]


def test_who_cannot_go_on_fails_alone(folders: Folders, plain: Answers, running: list[Engine]) -> None:
    engine = started(folders, speculation(folders, "draft_model"))
    running.append(engine)
    stuck = wish(0, "regex", allowed_token_ids=[EOS])
    early = wish(1, "choice", min_tokens=50)
    engine.put(*requests(engine, [*wishes(), stuck, early]))
    found = finish(engine)
    for name in (str(len(wishes())), str(len(wishes()) + 1)):
        assert "no token is left to choose" in str(engine.reasons[name])
        found.pop(name)
    assert found == plain


def test_a_grammar_that_becomes_slow_fails_alone(
    folders: Folders, plain: Answers, running: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_slots, "FollowLimits", partial(grammar_slots.FollowLimits, budget_s=0.3))
    engine = started(folders, speculation(folders, "draft_model"))
    running.append(engine)
    slow = wish(0, None, structured_outputs={"grammar": AMBIGUOUS}, max_tokens=170, min_tokens=170)
    engine.put(*requests(engine, [*wishes(), slow]))
    found = finish(engine)
    assert "too complex to follow" in str(engine.reasons[str(len(wishes()))])
    assert found | plain == found


def test_several_samples_with_log_probabilities_and_a_cached_prompt(folders: Folders) -> None:
    asked = wish(3, "compact", n=4, logprobs=2).params
    results = []
    for method in (None, "draft_model"):
        speculative = None if method is None else speculation(folders, method)
        with LLM(
            model=str(folders["target"]),
            dtype="float32",
            enforce_eager=True,
            block_size=4,
            speculative_config=speculative,
            max_num_seqs=8,
            num_gpu_blocks_override=200,
        ) as llm:
            first, again = (llm.generate("name: yes or no? name: ", asked, use_tqdm=False)[0] for _ in range(2))
        assert [each.token_ids for each in again.outputs] == [each.token_ids for each in first.outputs]
        assert again.num_cached_tokens > 0
        results.append(again)
    off, on = results
    assert len({tuple(each.token_ids) for each in off.outputs}) > 1
    for mine, other in zip(on.outputs, off.outputs, strict=True):
        assert mine.token_ids == other.token_ids
        if mine.finish_reason == "stop":
            assert FORMS["compact"].is_met(mine.text)
        for token, entry in zip(mine.token_ids, mine.logprobs, strict=True):
            assert entry[token].rank >= 1  # of the model's own logits: what is forbidden may stand before it


def test_requests_without_a_form_never_come_near(
    folders: Folders, running: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("nobody asked for a form")

    for name in ("allowed", "prune", "begin"):
        monkeypatch.setattr(grammar_slots.SlotGrammars, name, never)
    engine = started(folders, speculation(folders, "draft_model"))
    running.append(engine)
    engine.put(*requests(engine, [wish(i, None, max_tokens=12) for i in range(3)]))
    finish(engine)
    assert engine.accepted > 0
    grammars = engine.built.executor.rank.worker.sampler._masks.grammars  # type: ignore[attr-defined]
    assert not grammars._followers._by_key
    assert not grammars._grammars


def test_draft_tokens_before_a_dead_end_count(folders: Folders, running: list[Engine]) -> None:
    text = "yes it is"
    ids = tokenizer().encode(text, add_special_tokens=False)
    asked = {"structured_outputs": {"choice": [text]}, "prediction": text, "allowed_token_ids": ids}
    ends = {"dead end": {}, "stopped": {"stop": ["it is"]}, "long enough": {"max_tokens": len(ids)}}
    answers = []
    for method in (None, "ngram", "ngram tree"):
        engine = started(folders, method and speculation(folders, method))
        running.append(engine)
        engine.put(*requests(engine, [wish(i, None, **asked, **options) for i, options in enumerate(ends.values())]))
        answers.append((finish(engine), dict(engine.reasons)))
        assert (engine.accepted > 0) == (method is not None)
    assert answers[0] == answers[1] == answers[2]
    told, reasons = answers[0]
    assert all(tokens == ids for tokens in told.values())
    assert "no token is left" in str(reasons["0"])
    assert (reasons["1"], reasons["2"]) == ("stop", "length")


GENERATIONS = 500


def in_full(pair: ModelPair) -> dict[str, Options | None]:
    """Every method on the demo pair, and none."""
    head = REPOSITORY / "demo" / "heads" / "eagle3"
    return {
        "off": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        "draft_model": {"method": "draft_model", "model": str(pair.draft), "num_speculative_tokens": 4},
        "eagle3 tree": {"method": "eagle3", "model": str(head), "num_speculative_tokens": 12, "draft_shape": "tree"},
    }


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("form", ["json", "regex"])
def test_all_are_valid_and_the_same_in_full(form: str, demo_pair: ModelPair) -> None:
    workload = json.loads((REPOSITORY / "benchmarks" / "workload.json").read_text())
    texts = [entry["prompt"] for entry in workload["single"]]
    asked = [wish(i, form, max_tokens=400).params for i in range(GENERATIONS)]
    prompts = [texts[i % len(texts)] for i in range(GENERATIONS)]
    wanted: list[list[int]] = []
    for name, speculative in in_full(demo_pair).items():
        with LLM(
            model=str(demo_pair.target),
            dtype="float32",
            enforce_eager=True,
            speculative_config=speculative,
            max_num_seqs=32,
        ) as llm:
            found = [result.outputs[0] for result in llm.generate(prompts, asked, use_tqdm=False)]
            stats = llm.stats()
        valid = sum(each.finish_reason == "stop" and FORMS[form].is_met(each.text) for each in found)
        ids = [list(each.token_ids) for each in found]
        wanted = wanted or ids
        same = sum(ours == theirs for ours, theirs in zip(ids, wanted, strict=True))
        print(
            f"{form}, {name}: {valid} of {len(found)} valid, {same} as without speculation, "
            f"{stats.accepted} of {stats.proposed} guesses accepted"
        )
        assert valid == same == GENERATIONS
        assert (stats.proposed > stats.accepted > 0) if speculative else stats.proposed == 0
