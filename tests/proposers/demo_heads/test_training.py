"""The heads of `demo.train --heads`: training, files, and the shipped heads."""

import json
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo
from demo import corpus, evaluate, heads_eagle, own_text, train_heads, trainer
from demo.heads import Lesson, Teacher, anchors
from tests.support.models.shaken import shaken

METHODS = tuple(train_heads.MAKERS)
EMPTY = torch.empty(0)
ALL_HEADS = 25_000_000  # bytes


@pytest.mark.parametrize("method", METHODS)
def test_what_is_written_is_the_public_format_and_reads_back(
    method: str, teacher: Teacher, target: Path, tmp_path: Path
) -> None:
    head = shaken(train_heads.MAKERS[method](teacher, EMPTY))
    train_heads.write(head, teacher.config, tmp_path)
    assert_fits(method, tmp_path, target)
    assert str(target.parent) not in (tmp_path / "config.json").read_text()
    again = train_heads.read(train_heads.MAKERS[method](teacher, EMPTY), tmp_path)
    for name, weight in head.state_dict().items():
        assert torch.allclose(again.state_dict()[name], weight, rtol=1e-2), name


def test_a_large_vocabulary_is_cut_to_its_most_frequent_ids(
    teacher: Teacher, target: Path, lesson: Lesson, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_eagle, "LARGEST_VOCABULARY", 20)
    ids_N = torch.tensor([*range(70, 90)] * 2 + [*range(3, 60)])
    head = train_heads.MAKERS["eagle3"](teacher, ids_N)
    train_heads.write(head, teacher.config, tmp_path)
    spec, tensors = assert_fits("eagle3", tmp_path, target)
    assert spec.draft_size == 20
    assert import_module("proposers.formats.eagle3").load(spec, tensors)["target_ids"].tolist() == [*range(70, 90)]
    drafted = head.best(lesson, 0, head.states(lesson, lesson.true_tokens)[0])
    assert set(drafted.flatten().tolist()) <= set(range(70, 90))
    assert head.comparable(lesson.logits_BLV).shape[-1] == 20
    assert torch.isfinite(head.loss(lesson))


def assert_fits(method: str, folder: Path, target: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """The engine's reader takes every tensor in *folder*: none is missing, left over or of another shape."""
    config, theirs = (json.loads((each / "config.json").read_text()) for each in (folder, target))
    tensors = stored(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return import_module(f"proposers.formats.{method}").read(config, theirs, shapes), tensors


def stored(folder: Path) -> dict[str, torch.Tensor]:
    path = next(path for path in folder.iterdir() if path.name != "config.json")
    return torch.load(path, weights_only=True) if path.suffix == ".pt" else train_heads.load_file(path)


def test_agreement_counts_drafts_that_are_right_from_their_start(teacher: Teacher) -> None:
    """With a head that is wrong only in its second draft token, at anchors where that token is odd."""

    class Knowing(heads_eagle.Eagle1):
        def best(self, lesson: Lesson, index: int, states: torch.Tensor) -> torch.Tensor:
            true = lesson.true_tokens(index, states)
            return torch.where((true % 2 == 1) & (index == 1), true + 1, true)

    texts = evaluate.continuations(teacher, torch.randint(3, 96, (400,)))
    assert texts.shape == (evaluate.NUM_TEXTS, evaluate.TOKENS)
    one, two, three, length = evaluate.agreement(teacher, Knowing(teacher, depth=3), texts)
    even = (texts[:, evaluate.PROMPT_TOKENS + 1 : evaluate.TOKENS - 3] % 2 == 0).float().mean().item()
    assert (one, two, three) == pytest.approx((1.0, even, even), abs=0.02)
    assert length == pytest.approx(one + two + three)


def test_a_free_run_feeds_itself(teacher: Teacher, lesson: Lesson) -> None:
    head = shaken(heads_eagle.Eagle3(teacher, depth=3))
    drafted = evaluate.free_running(head, lesson)
    forced = head.states(lesson, lambda index, _: drafted[index])
    for i, states in enumerate(forced):
        assert torch.equal(head.best(lesson, i, states), drafted[i])
    assert not torch.equal(torch.stack(forced), torch.stack(head.states(lesson, lesson.true_tokens)))


@pytest.mark.full
def test_training_makes_every_head_better(target: Path, teacher: Teacher, lesson: Lesson, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    ids = torch.randint(3, 96, (4000,), generator=torch.Generator().manual_seed(1)).int()
    heads = {method: make(teacher, ids) for method, make in train_heads.MAKERS.items()}
    before = {method: head.loss(lesson).item() for method, head in heads.items()}
    modules = torch.nn.ModuleDict(heads)
    run = trainer.TrainingRun(minutes=0.3, length=48, batch=4)
    work = trainer.Trainer(modules, [ids], run, tmp_path / "state.pt", optimized_by=train_heads._one_each)
    work.train(train_heads.joint_loss(teacher, heads), "heads")
    for method, head in heads.items():
        assert head.loss(lesson).item() < before[method], method


@pytest.mark.full
def test_heads_for_ones_own_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder of text to a folder a head; a run that is over writes the same again."""
    monkeypatch.setattr(own_text, "TOKENS", 192)
    text, work, out = (tmp_path / name for name in ("text", "work", "out"))
    for folder in (text, work):
        folder.mkdir()
    for path in corpus.split(corpus.stdlib_root())[0][:12]:
        (text / path.name).write_text(path.read_text(encoding="utf-8"))
    heldout = next(name for name in map("kept_{}.py".format, range(99)) if corpus.is_heldout(name))
    (text / heldout).write_text("a = 1\n" * 99)
    material, run = train_heads.Material(text, 8), trainer.TrainingRun(minutes=0.2, length=96, batch=2)
    train_once = partial(train_heads.train_heads, demo.pair()[0], ["medusa", "eagle"], material, work, run)
    shares = train_once(out=out)
    assert [len(shares[method]) for method in ("medusa", "eagle")] == [5, 4]
    train_once(out=tmp_path / "again")
    for method in ("medusa", "eagle"):
        assert_fits(method, out / method, demo.pair()[0])
        first, again = stored(out / method), stored(tmp_path / "again" / method)
        assert all(torch.equal(weight, again[name]) for name, weight in first.items())


@pytest.mark.parametrize("method", METHODS)
def test_shipped_heads_fit_the_demo_target(method: str) -> None:
    config = json.loads((demo.head(method) / "config.json").read_text())
    spec, tensors = assert_fits(method, demo.head(method), demo.pair()[0])
    assert spec.vocab_size == 4096
    assert config.get("torch_dtype") == "bfloat16"
    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())


def test_shipped_heads_are_small() -> None:
    files = [path for method in METHODS for path in demo.head(method).iterdir()]
    assert sum(path.stat().st_size for path in files) <= ALL_HEADS


def test_shipped_eagle3_is_right_more_often_than_the_mlp_speculator_and_a_repeater() -> None:
    """On held-out text: the share of first draft tokens equal to the target's, teacher forced."""
    folder = demo.pair()[0]
    teacher = Teacher(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    ids_BL = heldout_ids(folder)
    lesson = teacher.teach(ids_BL, anchors(ids_BL, 100, 5))
    wanted = lesson.at(lesson.logits_BLV, 1).argmax(-1)
    right = {
        method: (first_guess(method, teacher, lesson) == wanted).float().mean().item()
        for method in ("eagle3", "mlp_speculator")
    }
    assert right["eagle3"] > right["mlp_speculator"]


def first_guess(method: str, teacher: Teacher, lesson: Lesson) -> torch.Tensor:
    head = train_heads.read(train_heads.MAKERS[method](teacher, EMPTY), demo.head(method))
    return partial(head.best, lesson)(0, head.states(lesson, lesson.true_tokens)[0])


def heldout_ids(folder: Path) -> torch.Tensor:
    text = next(
        corpus.stdlib_root() / name
        for name in corpus.HELDOUT_LIST.read_text().split()
        if (corpus.stdlib_root() / name).exists() and (corpus.stdlib_root() / name).stat().st_size > 8000
    )
    ids = trainer.encode([text.read_text(encoding="utf-8")], AutoTokenizer.from_pretrained(folder))
    return ids[: 4 * 256].long().view(4, 256)
