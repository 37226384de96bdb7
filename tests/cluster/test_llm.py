"""`LLM`: vLLM's signatures and result types with a real engine; requests do not affect each other."""

import math
import shutil
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.settings import engine_config
from protos.errors import ConfigError, EngineDeadError, InvalidRequestError
from protos.messages import RoundPlan, Verdict
from protos.sampling import SamplingParams
from slipstream import LLM
from tests.support.models import tiny_pairs
from tests.support.policies import always

SMALL = {"dtype": "float32", "num_gpu_blocks_override": 128, "enforce_eager": True, "max_num_seqs": 8}
PROMPTS = ["The future of AI is", "def main():", "x"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> Iterator[LLM]:
    target, draft = pair
    speculative = always({"model": str(draft), "num_speculative_tokens": 3})
    with LLM(str(target), speculative_config=speculative, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(pair: tuple[Path, Path]) -> list[list[int]]:
    """Return greedy continuations by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt).input_ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


def test_greedy_answers_are_those_of_transformers(llm: LLM, reference: list[list[int]]) -> None:
    results = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [result.outputs[0].token_ids for result in results] == reference
    assert [result.prompt for result in results] == PROMPTS
    speculation = [result.speculation for result in results if result.speculation]
    assert sum(one.num_accepted_draft_tokens for one in speculation) > 0
    assert any(one.num_draft_tokens > one.num_accepted_draft_tokens for one in speculation)


def test_text_ids_and_dicts_are_the_same_prompt(llm: LLM) -> None:
    ids = llm.get_tokenizer()(PROMPTS[0]).input_ids
    forms = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}]
    answers = llm.generate(forms, GREEDY, use_tqdm=False) + llm.generate(ids, GREEDY, use_tqdm=False)
    bare = {"add_special_tokens": False}
    answers += llm.generate(forms[:1], GREEDY, use_tqdm=False, priority=[0], tokenization_kwargs=bare)  # has none
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1
    assert [answer.prompt for answer in answers] == [PROMPTS[0], PROMPTS[0], None, None, PROMPTS[0]]


def test_parameters_for_each_prompt_and_several_samples(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=3, ignore_eos=True), SamplingParams(n=2, max_tokens=5, ignore_eos=True, seed=1)]
    first, second = llm.generate(PROMPTS[:2], params, use_tqdm=False)
    assert [len(sample.token_ids) for sample in first.outputs] == [3]
    assert [(sample.index, len(sample.token_ids)) for sample in second.outputs] == [(0, 5), (1, 5)]
    assert second.outputs[0].token_ids != second.outputs[1].token_ids
    with pytest.raises(InvalidRequestError, match="must have 3 entries, as prompts, got 2"):
        llm.generate(PROMPTS, params)


def test_parameters_that_are_not_given_are_those_of_the_checkpoint(tmp_path: Path, pair: tuple[Path, Path]) -> None:
    folder = Path(shutil.copytree(pair[0], tmp_path / "recommending"))
    (folder / "generation_config.json").write_text('{"temperature": 0.0, "max_new_tokens": 5, "eos_token_id": []}')
    with LLM(str(folder), **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=None)
        (given,), (taken,) = (
            llm.generate(PROMPTS[0], some, use_tqdm=False)[0].outputs
            for some in (llm.get_default_sampling_params(), None)
        )
    assert given.token_ids == taken.token_ids
    assert len(taken.token_ids) <= 5


def test_logprobs_have_vllms_shape(llm: LLM, pair: tuple[Path, Path]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (result,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    sample = result.outputs[0]
    assert sample.logprobs is not None
    assert len(sample.logprobs) == len(sample.token_ids) == 4
    chosen = [position[token] for token, position in zip(sample.token_ids, sample.logprobs, strict=True)]
    assert [one.rank for one in chosen] == [1] * 4
    assert math.isclose(sample.cumulative_logprob or 0.0, sum(one.logprob for one in chosen), rel_tol=1e-6)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32)
    ids = torch.tensor([[*result.prompt_token_ids, *sample.token_ids]])
    with torch.no_grad():
        expected = model(ids).logits.log_softmax(-1)[0]
    for position, entry in enumerate(result.prompt_logprobs[1:]):
        token = result.prompt_token_ids[position + 1]
        assert entry is not None
        assert entry[token].logprob == pytest.approx(expected[position, token].item(), abs=1e-4)


def test_chat_answers_the_rendered_conversation(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert answer.prompt == "user: hi\nassistant:"
    (plain,) = llm.generate(answer.prompt_token_ids, GREEDY, use_tqdm=False)
    assert plain.outputs[0].token_ids == answer.outputs[0].token_ids
    assert len(llm.chat([messages, messages], GREEDY, use_tqdm=False)) == 2
    with pytest.raises(InvalidRequestError, match="messages must be a list with at least one, got 'hi'"):
        llm.chat("hi", GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="add_special_tokens must be False: the template has them, got True"):
        llm.chat(messages, GREEDY, tokenization_kwargs={"add_special_tokens": True})


def test_a_stream_adds_up_and_may_be_left(llm: LLM, reference: list[list[int]]) -> None:
    outputs = list(llm.stream(PROMPTS[0], GREEDY))
    assert [token for output in outputs for token in output.token_ids] == reference[0]
    assert outputs[-1].finish_reason == "length"
    left = llm.stream(PROMPTS[0], GREEDY)
    next(left)
    left.close()
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == reference[0]


def test_a_half_read_stream_neither_gets_nor_loses_what_others_say(llm: LLM, reference: list[list[int]]) -> None:
    first, second = (llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2])
    heads = [list(next(first).token_ids), list(next(second).token_ids)]
    (result,) = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    third = llm.stream(PROMPTS[2], GREEDY)
    next(third)
    third.close()
    tails = [[token for output in stream for token in output.token_ids] for stream in (first, second)]
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == reference[:2]
    assert result.outputs[0].token_ids == reference[2]
    assert not llm._arrived


@pytest.mark.parametrize("has_run", [False, True])
def test_an_interrupted_step_costs_other_streams_nothing(
    llm: LLM, reference: list[list[int]], has_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come before the workers have seen a plan: what they lack is sent again."""
    executor, rounds = llm._engine.assembled.executor, count()
    run = executor.run

    def interrupted(plan: RoundPlan) -> list[Verdict]:
        if next(rounds) != 1:
            return run(plan)
        if has_run:
            run(plan)
        raise KeyboardInterrupt

    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    heads = [list(next(stream).token_ids) for stream in streams]
    monkeypatch.setattr(executor, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    tails = [[token for output in stream for token in output.token_ids] for stream in streams]
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == reference[:2]
    assert llm.generate(PROMPTS, GREEDY, use_tqdm=False)[2].outputs[0].token_ids == reference[2]
    scheduler = llm._engine.assembled.controller.scheduler
    scheduler.check_integrity()
    assert not scheduler._in_flight


@pytest.mark.parametrize("within", ["schedule", "commit"])
def test_an_interrupt_waits_until_the_books_of_a_step_are_kept(
    llm: LLM, reference: list[list[int]], within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C that came after the first of two rows lost the tokens of both, which no one had read."""
    scheduler, rows = llm._engine.assembled.controller.scheduler, count()
    owner, name = (scheduler._planner, "row") if within == "schedule" else (scheduler, "_commit_row")
    method = getattr(owner, name)

    def interrupted(*row: Any) -> Any:
        if next(rows) == 1:
            signal.raise_signal(signal.SIGINT)
        return method(*row)

    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:2]]
    heads = [list(next(stream).token_ids) for stream in streams]
    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    tails = [[token for output in stream for token in output.token_ids] for stream in streams]
    assert [head + tail for head, tail in zip(heads, tails, strict=True)] == reference[:2]
    scheduler.check_integrity()


@pytest.mark.parametrize("params", [{"max_tokens": 1}, [{"max_tokens": 1}], "greedy"])
def test_parameters_of_another_type(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, or a list of them, got"):
        llm.generate(PROMPTS[:1], params, use_tqdm=False)


def test_an_interrupt_after_a_step_loses_none_of_its_tokens(
    llm: LLM, reference: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, rounds = llm._engine.assembled.controller, count()
    report = controller._report

    def interrupted(*step: Any) -> None:
        if next(rounds) == 1:
            raise KeyboardInterrupt
        report(*step)

    stream = llm.stream(PROMPTS[0], GREEDY)
    head = list(next(stream).token_ids)
    monkeypatch.setattr(controller, "_report", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    assert head + [token for output in stream for token in output.token_ids] == reference[0]


def test_a_dead_engine_ends_half_read_streams_too(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(str(pair[0]), **SMALL) as llm:
        left = llm.stream(PROMPTS[0], GREEDY)
        next(left)
        monkeypatch.setattr(llm._engine.assembled.executor, "run", lambda plan: 1 / 0)
        with pytest.raises(EngineDeadError, match="ZeroDivisionError"):
            llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
        assert [output.finish_reason for output in left] == ["error"]


def test_one_bad_prompt_schedules_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt must not be empty"):
        llm.generate(["fine", ""], GREEDY)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert llm.generate([], GREEDY) == []


def test_the_progress_bar_counts_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown
    assert "3/3" in shown


def test_without_a_tokenizer(pair: tuple[Path, Path], llm: LLM, reference: list[list[int]]) -> None:
    ids = llm.get_tokenizer()(PROMPTS[0]).input_ids
    with LLM(str(pair[0]), skip_tokenizer_init=True, **SMALL) as blind:
        (result,) = blind.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)
        assert blind.get_tokenizer() is None
    assert (result.outputs[0].token_ids, result.outputs[0].text) == (reference[0], "")


# Settings


def test_no_model_is_the_demo_pair_with_its_draft() -> None:
    config = engine_config({})
    assert (Path(config.model.model).name, config.served_model_name) == ("target", ("demo",))
    assert config.speculative is not None
    assert (config.speculative.method, Path(config.speculative.model or "").name) == ("draft_model", "draft")


@pytest.mark.parametrize("given", [{"speculative_config": None}, {"speculative_config": "null"}])
def test_speculation_of_the_demo_can_be_turned_off(given: dict[str, object]) -> None:
    assert engine_config(given).speculative is None


def test_speculation_of_the_demo_can_be_changed() -> None:
    ngram = engine_config({"speculative_config": {"method": "ngram"}}).speculative
    assert ngram is not None
    assert ngram.method == "ngram"
    for given in ({"spec_tokens": 7}, {"speculative_config": {"num_speculative_tokens": 7}}):
        config = engine_config(given).speculative
        assert config is not None
        assert (config.method, config.num_speculative_tokens) == ("draft_model", 7)


def test_a_model_of_ones_own_speculates_only_when_asked() -> None:
    assert engine_config({"model": "m"}).speculative is None


def test_arguments_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM("no/such/model", max_modl_len=5)
