"""The shipped demo pair, and training of drafts for other models."""

import json
import random
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.settings import engine_config
from demo import corpus, losses, own_text, pair, programs, train, train_heads, trainer
from demo.trainer import TrainingError

SMALL = 80 * 1000 * 1000


def test_the_pair_is_small_shares_a_tokenizer_and_loads_in_plain_transformers() -> None:
    target, draft = (AutoModelForCausalLM.from_pretrained(folder) for folder in pair())
    assert sum(path.stat().st_size for folder in pair() for path in folder.iterdir()) <= SMALL
    assert 15e6 <= target.num_parameters() <= 30e6
    assert draft.num_parameters() <= target.num_parameters() / 5
    mine, other = (AutoTokenizer.from_pretrained(folder).get_vocab() for folder in pair())
    assert mine == other


def test_the_playgrounds_first_prompt_has_an_answer() -> None:
    page = files("runtime.http").joinpath("playground/app.js").read_text("utf-8")
    prompt = json.loads(re.findall(r"^  complete: (\".*\"),$", page, re.MULTILINE)[0])
    tokenizer = AutoTokenizer.from_pretrained(pair()[0])
    ids_BT = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
    model = AutoModelForCausalLM.from_pretrained(pair()[0], dtype=torch.float32)
    answer = tokenizer.decode(model.generate(ids_BT, max_new_tokens=64, do_sample=False)[0, ids_BT.shape[1] :])
    assert "return" in answer


def test_what_is_held_out_is_not_trained_on(tmp_path: Path) -> None:
    for name in [f"module_{i}.py" for i in range(60)]:
        (tmp_path / name).write_text("x = 1\n")
    kept, heldout = corpus.split(tmp_path)
    assert heldout
    assert not set(kept) & set(heldout)
    assert len(kept) + len(heldout) == 60
    assert corpus.HELDOUT_LIST.read_text().split()
    assert all(corpus.is_heldout(name) for name in corpus.HELDOUT_LIST.read_text().split())


def test_batches_take_from_every_stream_and_are_the_same_again(tmp_path: Path) -> None:
    streams = [torch.zeros(100, dtype=torch.int32), torch.ones(100, dtype=torch.int32)]
    run = trainer.TrainingRun(1.0, length=8, batch=4)
    trainers = [trainer.Trainer(torch.nn.Linear(2, 2), streams, run, tmp_path / "none.pt") for _ in range(2)]
    batches = [each._batch() for each in trainers]
    assert batches[0].tolist() == [[i % 2] * 8 for i in range(4)]
    assert torch.equal(*batches)


def test_a_checkpoint_is_resumed_for_its_own_purpose_only(tmp_path: Path) -> None:
    """A draft that was to be trained further from its weights was the finished one again, without a word."""
    material, state = train_heads.Material(tmp_path, own_texts=0), tmp_path / "draft.pt"
    purposes = [material.purpose("a draft", tmp_path / "target", start) for start in (None, tmp_path / "draft")]
    streams = [torch.zeros(100, dtype=torch.int32)]
    first, other = (trainer.TrainingRun(0.0, length=8, purpose=purpose) for purpose in purposes)
    trainer.Trainer(torch.nn.Linear(2, 2), streams, first, state).train(lambda ids: ids.sum(), "draft")
    trainer.Trainer(torch.nn.Linear(2, 2), streams, first, state)
    with pytest.raises(TrainingError, match=r"is the checkpoint of a draft for .*target on .*, not of .* from .*draft"):
        trainer.Trainer(torch.nn.Linear(2, 2), streams, other, state)


def test_the_targets_texts_are_as_many_as_asked_for_and_of_the_same_material(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts of an earlier run were taken again, however many they were and whatever they began with."""
    written: list[int] = []

    def write(target: Path, ids: torch.Tensor, count: int) -> torch.Tensor:
        written.append(count)
        return torch.arange(count * own_text.TOKENS, dtype=torch.int32)

    def lengths(text: Path, *counts: int) -> list[int]:
        materials = [train_heads.Material(text, count) for count in counts]
        found = [list(train_heads.streams(torch.empty(0), tmp_path, material, tmp_path))[1] for material in materials]
        return [len(ids_N) // own_text.TOKENS for ids_N in found]

    monkeypatch.setattr(own_text, "write", write)
    assert lengths(tmp_path / "a", 4, 4, 2, 6) == [4, 4, 2, 6]
    assert written == [4, 6]
    with pytest.raises(TrainingError, match=r"own_text.safetensors has texts .* on .*a, not .* on .*b: delete it"):
        lengths(tmp_path / "b", 4)


def test_text_shorter_than_a_sequence_is_refused(tmp_path: Path) -> None:
    streams, run = [torch.zeros(8, dtype=torch.int32)], trainer.TrainingRun(1.0, length=8)
    with pytest.raises(TrainingError, match="the text has 8 tokens, but sequences of 8 are cut from it"):
        trainer.Trainer(torch.nn.Linear(2, 2), streams, run, tmp_path / "none.pt")


@pytest.mark.parametrize("option", ["--target", "--draft", "--text"])
def test_a_folder_that_is_not_there_is_named(option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "missing")
    monkeypatch.setattr(sys, "argv", ["train", option, missing])
    with pytest.raises(SystemExit, match=f"{option}: no .* {re.escape(missing)}"):
        train.main()


def filled() -> Iterator[programs.Program]:
    """Every program of the demo's text, three times with other words."""
    for template in programs.templates():
        for seed in range(3):
            yield programs.program(template, random.Random(seed))


def test_every_program_that_the_target_learns_from_is_right() -> None:
    for program in filled():
        names: dict[str, Any] = {"__name__": "program"}
        exec(compile(program.source, program.request, "exec"), names)
        for check in program.checks:
            assert eval(check, names), f"{check} in\n{program.source}"
        assert "$" not in program.source + program.request
        assert "{{" not in program.source + program.request


def test_programs_come_alone_together_and_as_conversations() -> None:
    texts = list(programs.texts(200))
    assert texts == list(programs.texts(200))
    conversations = [text for text in texts if text.startswith("# user: ")]
    assert 40 < len(conversations) < 80
    tokenizer = AutoTokenizer.from_pretrained(pair()[0])
    for text in conversations:
        request = text.splitlines()[0].removeprefix("# user: ")
        turn = [{"role": "user", "content": request}]
        assert text.startswith(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    together = [text for text in texts if "\n\n\ndef " in text or "\n\n\nclass " in text]
    assert 70 < len(together) < 130


def test_the_training_texts_of_the_standard_library_have_programs_with_them(tmp_path: Path) -> None:
    (tmp_path / "module_0.py").write_text("x = 1\n")
    assert set(corpus.training_texts(tmp_path)) <= {"x = 1\n"}
    texts = corpus.training_texts(corpus.stdlib_root())
    assert len(texts) == len(corpus.split(corpus.stdlib_root())[0]) + programs.NUM_TEXTS


@pytest.mark.full
def test_a_draft_for_ones_own_target_learns_from_text_and_from_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, work, out = (tmp_path / name for name in ("text", "work", "out"))
    for folder in (text, work):
        folder.mkdir()
    for path in corpus.split(corpus.stdlib_root())[0][:12]:
        (text / path.name).write_text(path.read_text(encoding="utf-8"))
    monkeypatch.setattr(own_text, "TOKENS", 192)
    target = pair()[0]
    untrained = train.new_draft(target)
    material = train_heads.Material(text, own_texts=8)
    train.train_draft(target, material, work, trainer.TrainingRun(minutes=0.5, length=128), out=out)
    teacher, student = (AutoModelForCausalLM.from_pretrained(folder) for folder in (target, out))
    ids = load_file(work / "own_text.safetensors")["ids"]
    assert len(ids) == 8 * 192
    batch = ids[: 4 * 192].long().view(4, 192)
    with torch.no_grad():
        wanted = teacher(batch).logits
        before, after = (
            losses.divergence(model(batch).logits.flatten(0, 1), wanted.flatten(0, 1)) for model in (untrained, student)
        )
    assert after < 0.8 * before
    train.train_draft(
        target, material, tmp_path, trainer.TrainingRun(minutes=0.001, length=128), out=tmp_path / "on", start=out
    )
    assert (tmp_path / "on" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("speculative", "method", "num_tokens"),
    [
        ({"algorithm": "NGRAM", "num_draft_tokens": 4}, "ngram", 4),
        ({"decoding_type": "ngram", "max_draft_len": 2}, "ngram", 2),
        ({"speculative_model": str(pair()[1]), "num_speculative_tokens": 3}, "draft_model", 3),
        ({"max_draft_len": 2}, "draft_model", 2),
    ],
    ids=str,
)
def test_the_draft_is_used_unless_another_method_is_chosen_in_any_words(
    speculative: dict[str, object], method: str, num_tokens: int
) -> None:
    found = engine_config({"speculative_config": speculative}).speculative
    assert found is not None
    assert (found.method, found.num_speculative_tokens) == (method, num_tokens)
