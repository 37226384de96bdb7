"""The heads that `demo.train --heads` trains: their mathematics, their files, and those that are shipped."""

import json
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import demo
from demo import corpus, evaluate, heads_eagle, losses, own_text, train_heads, trainer
from demo.heads import Head, Lesson, Teacher, _InSlices, anchors
from tests.support.models import published, tiny_models

METHODS = tuple(train_heads.MAKERS)
EMPTY = torch.empty(0)
ALL_HEADS = 25_000_000  # bytes


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("target"), spread=0.1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def teacher(target: Path) -> Teacher:
    return Teacher(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))


@pytest.fixture(scope="module")
def lesson(teacher: Teacher) -> Lesson:
    ids_BL = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(3))
    return teacher.teach(ids_BL, anchors(ids_BL, 7, 5))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def shaken(head: Head) -> Head:
    """Return *head* with noise on every weight: what begins as zeros or ones hides mistakes."""
    for weight in head.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.2)
    return head.eval()


def test_a_lesson_holds_what_the_target_computes(lesson: Lesson, teacher: Teacher) -> None:
    seen = teacher.model(input_ids=lesson.ids_BL, output_hidden_states=True)
    at = (1, lesson.anchors_BM[1, 3])
    assert torch.equal(lesson.tokens(2)[1, 3], lesson.ids_BL[1, at[1] + 2])
    assert torch.allclose(lesson.at_anchors_BMH[1, 3], seen.hidden_states[-1][at])
    assert torch.allclose(lesson.at(lesson.aux_BLF)[1, 3, 32:64], seen.hidden_states[1][at])
    assert torch.allclose(teacher.output(lesson.at_anchors_BMH), lesson.at(seen.logits), atol=1e-5)
    assert lesson.anchors_BM.max() <= 24 - 5 - 2
    assert torch.equal(lesson.anchors_BM, anchors(lesson.ids_BL, 7, 5))


def test_a_family_whose_head_is_something_else_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models.build("gemma2", tmp_path))
    Teacher(model)
    model.lm_head.register_forward_hook(lambda *seen: seen[-1] * 2)
    teacher = Teacher(model)
    teacher.output_layer = torch.nn.Linear(32, 96)
    with pytest.raises(ValueError, match="gemma2"):
        teacher._check()


def test_a_loss_in_slices_is_the_loss_and_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.heads.ROWS_AT_ONCE", 3)
    states, weight = torch.randn(7, 5, requires_grad=True), torch.nn.Parameter(torch.randn(11, 5))
    wanted = torch.randn(7, 11)

    def score(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return losses.divergence(states @ weight.T, wanted)

    found, expected = _InSlices.apply(score, states, wanted, weight) * 2, score(states, wanted) * 2
    assert torch.allclose(found, expected)
    slopes, plain = (torch.autograd.grad(loss, (states, weight)) for loss in (found, expected))
    assert all(torch.allclose(mine, other, atol=1e-6) for mine, other in zip(slopes, plain, strict=True))


def dense_layer(
    weights: dict[str, torch.Tensor], prefix: str, x_TW: torch.Tensor, residual_TH: torch.Tensor, config: Any
) -> torch.Tensor:
    """One layer over whole sequences, for the state behind the last entry."""
    sees = published.causal(len(x_TW))
    attended = published.attention(
        weights,
        f"{prefix}.self_attn",
        x_TW,
        list(range(len(x_TW))),
        sees,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
    )
    state = residual_TH + attended
    normed = published.rms(state, weights[f"{prefix}.post_attention_layernorm.weight"])
    return (state + published.mlp(weights, f"{prefix}.mlp", normed))[-1]


def eagle1_entry(weights: dict[str, torch.Tensor], embedded: torch.Tensor, state: torch.Tensor) -> Any:
    mixed = published.linear(weights, "fc", torch.cat([embedded, state], -1))
    return mixed, mixed


def eagle3_entry(weights: dict[str, torch.Tensor], embedded: torch.Tensor, state: torch.Tensor) -> Any:
    normed = (
        published.rms(embedded, weights["midlayer.input_layernorm.weight"]),
        published.rms(state, weights["midlayer.hidden_norm.weight"]),
    )
    return torch.cat(normed, -1), state


@pytest.mark.parametrize(
    ("make", "entry", "prefix"),
    [
        (heads_eagle.Eagle1, eagle1_entry, "layers.0"),
        (heads_eagle.Eagle3, eagle3_entry, "midlayer"),
    ],
)
def test_chains_behind_anchors_are_what_a_draft_computes_one_step_after_another(
    make: Any, entry: Any, prefix: str, teacher: Teacher, lesson: Lesson
) -> None:
    """Entries of the target's states up to the anchor, then of the chain's own, in an ordinary causal layer."""
    head: heads_eagle.Eagle = shaken(make(teacher, depth=3))  # type: ignore[assignment]
    weights = dict(head.state_dict())
    outs = head.chain(lesson, lesson.true_tokens)
    for row, place in ((0, 2), (1, 6)):
        anchor = int(lesson.anchors_BM[row, place])
        known = lesson.states_BLH[row] if prefix != "midlayer" else published.linear(weights, "fc", lesson.aux_BLF[row])
        states = list(known[: anchor + 1])
        for out in outs:
            tokens = lesson.ids_BL[row, 1 : len(states) + 1]
            x, residual = entry(weights, lesson.embedded(tokens), torch.stack(states))
            states.append(dense_layer(weights, prefix, x, residual, teacher.config))
            assert torch.allclose(out[row, place], states[-1], atol=1e-4)


def test_flat_heads_compute_what_was_published(teacher: Teacher, lesson: Lesson) -> None:
    """Hydra's second head, the MLP speculator's third guess, ReDrafter's second: by their formulas."""
    hydra, mlp, recurrent = (
        shaken(make(teacher, depth=3))
        for make in (  # type: ignore[arg-type]
            train_heads.Hydra,
            train_heads.MlpSpeculator,
            train_heads.Recurrent,
        )
    )
    state, one, two = (lesson.at_anchors_BMH, *(lesson.embedded(lesson.tokens(i)) for i in (1, 2)))
    weights = hydra.state_dict()
    read = torch.cat([state, one, two], -1)
    gate = published.linear(weights, "hydra_mlp.1.0.linear", read)
    wanted = published.linear(weights, "hydra_mlp.1.0.res_connection", read) + gate * gate.sigmoid()
    assert torch.allclose(hydra.states(lesson, lesson.true_tokens)[1], wanted, atol=1e-5)

    weights, inner = mlp.state_dict(), 8
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
    s = published.rms(state, torch.ones(32)) / 2**0.5
    for i in range(3):
        embedded = weights["speculator.emb.0.weight"][lesson.tokens(1 + i)]
        s = published.linear(weights, f"speculator.proj.{min(i, 1)}", s) * state_weight + embedded * token_weight
        s = published.rms(s, weights["speculator.ln.0.weight"]) + weights["speculator.ln.0.bias"]
        s = torch.nn.functional.gelu(s)
    assert torch.allclose(mlp.states(lesson, lesson.true_tokens)[2], s, atol=1e-5)

    weights, s = recurrent.state_dict(), torch.zeros_like(state)
    for embedded in (one, two):
        s = published.linear(weights, "rnn_w", embedded) + published.linear(weights, "rnn_u", s)
        s = s * s.sigmoid()
    x = published.linear(weights, "input_proj", torch.cat([state, s], -1))
    x = x + torch.nn.functional.silu(published.linear(weights, "lm_head.0.linear", x))
    assert torch.allclose(recurrent.states(lesson, lesson.true_tokens)[1], x, atol=1e-5)
    assert torch.allclose(recurrent.logits(lesson, 1, x), published.linear(weights, "lm_head.1", x), atol=1e-5)


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
    guessed = head.best(lesson, 0, head.states(lesson, lesson.true_tokens)[0])
    assert set(guessed.flatten().tolist()) <= set(range(70, 90))
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
    """By a head that is right but in its second guess, behind every anchor whose token there is odd."""

    class Knowing(heads_eagle.Eagle1):
        def best(self, lesson: Lesson, guess: int, states: torch.Tensor) -> torch.Tensor:
            true = lesson.true_tokens(guess, states)
            return torch.where((true % 2 == 1) & (guess == 1), true + 1, true)

    texts = evaluate.continuations(teacher, torch.randint(3, 96, (400,)))
    assert texts.shape == (evaluate.NUM_TEXTS, evaluate.TOKENS)
    one, two, three, length = evaluate.agreement(teacher, Knowing(teacher, depth=3), texts)
    even = (texts[:, evaluate.PROMPT_TOKENS + 1 : evaluate.TOKENS - 3] % 2 == 0).float().mean().item()
    assert (one, two, three) == pytest.approx((1.0, even, even), abs=0.02)
    assert length == pytest.approx(one + two + three)


def test_a_free_run_feeds_itself(teacher: Teacher, lesson: Lesson) -> None:
    head = shaken(heads_eagle.Eagle3(teacher, depth=3))
    guesses = evaluate.free_running(head, lesson)
    forced = head.states(lesson, lambda guess, _: guesses[guess])
    for i, states in enumerate(forced):
        assert torch.equal(head.best(lesson, i, states), guesses[i])
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
    """On a text that was held out: the share of first guesses that are what the target says, teacher forced."""
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
