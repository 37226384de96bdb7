"""Logits under `batch_invariant`: for every family the same bits, however a position was computed."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from protos.config.engine import ModelConfig
from protos.draft import Draft
from protos.errors import ConfigError
from protos.messages import NewSequence, RoundPlan, Row, Sampling
from tests.support.distributed.ranks import in_memory
from tests.support.models.tiny_models import FAMILIES, SPECIFIC, build
from tests.workers.model.test_models import reference_logits
from workers.distributed.groups import Group
from workers.invariant import native as invariant_native
from workers.invariant import trace as invariant
from workers.invariant.model import sum_in_order
from workers.model.loader import load
from workers.model.runner import ModelRunner
from workers.native.build import load_function
from workers.slots import SlotTable
from workers.target import Scoring

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB, BLOCK, ROWS, LENGTH = 97, 4, 32, 37
SPLIT_QUICKLY = frozenset({"llama", "gemma2", "phi3", "olmo2", "gpt2", "gpt_bigcode", "opt", "cohere", "stablelm",
                           "mixtral", "gpt_oss", "deepseek_v3"})  # fmt: skip
"""One family of each way to be split."""
TREE = (Draft((0,) * 9, (-1, -1, 0, 2, 1, 2, 3, 6, 0)), (0, 2, 3, 6, 7))
"""A tree, and the nodes of the branch that holds the true tokens."""
Table = dict[str, torch.Tensor]


class Model:
    """A runner over `ROWS` sequences, all of which have their blocks."""

    def __init__(self, folder: Path, dtype: str = "bfloat16", group: Group | None = None, **options: object) -> None:
        loaded = load(ModelConfig(model=str(folder), device="cpu", dtype=dtype, batch_invariant=True, **options), group)
        self.slots = SlotTable(ROWS, 64, BLOCK, 16)
        rng = np.random.default_rng(3)
        self.texts = rng.integers(3, VOCAB, (ROWS, LENGTH))
        each = -(-(LENGTH + 16) // BLOCK)
        tables = rng.permutation(ROWS * each).reshape(ROWS, each)
        new = [NewSequence(i, text.tolist(), LENGTH, Sampling(seed=0)) for i, text in enumerate(self.texts)]
        grown = [
            Row(i, 0, 1, LENGTH, new_block_ids=table.tolist(), new_block_versions=[0] * each)
            for i, table in enumerate(tables)
        ]
        self.slots.apply(RoundPlan(0, grown, new))
        self.runner = ModelRunner(loaded, self.slots, ROWS * each, BLOCK)

    def feed(self, parts: list[tuple[int, int, int]], drafts: dict[int, Draft] | None = None) -> list[torch.Tensor]:
        """Feed (row, first, count) with drafts behind some rows' last tokens; return the logits of each, `[X, V]`."""
        rows = [Row(row, first, count, first + count, samples=True) for row, first, count in parts]
        told = [(drafts or {}).get(row.slot, Draft(())) for row in rows]
        for row, draft in zip(rows, told, strict=True):
            if draft.tokens:
                self.slots.write_draft(row.slot, draft.tokens)
        batch = Scoring.of(rows, told, self.slots.tokens).batch
        logits = self.runner.forward(batch, np.arange(len(batch.tokens_T)))
        return [part.clone() for part in logits.split(batch.lengths_R.tolist())]

    def known(self, length: int) -> None:
        """Say how much of row 0 is known."""
        self.slots.known_len[0] = length


def bits(logits: torch.Tensor) -> torch.Tensor:
    return logits.contiguous().view(torch.int32)


def ways(model: Model) -> Table:
    """Return row 0's logits by how they were computed, `[LENGTH, V]` or the last of these."""
    found = {"prefill": model.feed([(0, 0, LENGTH)])[0]}
    sizes = (8, 1, 13, 2, 7)
    ends = np.cumsum(sizes).tolist()
    chunks = [model.feed([(0, end - size, size)])[0] for end, size in zip(ends, sizes, strict=True)]
    found["chunks, then decode"] = torch.cat([*chunks, *(model.feed([(0, at, 1)])[0] for at in range(31, LENGTH))])
    for count in (7, ROWS):
        others = [(row, 0, 1 + row % 6) for row in range(1, count)]
        prefilled = model.feed([*others[:3], (0, 0, 20), *others[3:]])[3]
        decoded = []
        for at in range(20, 22):
            others = [(row, (1 + row % 6) + at - 20, 1) for row in range(1, count)]
            decoded.append(model.feed([*others, (0, at, 1)])[-1])
        found[f"among {count}"] = torch.cat([prefilled, *decoded])
    return {**found, **guessed(model)}


def guessed(model: Model) -> Table:
    """The same of verifications: of chains of which some guesses are right, and of a tree."""
    found = {}
    for right, guesses in ((3, 5), (12, 16)):
        model.feed([(0, 0, 20)])
        model.known(21)
        draft = Draft((*model.texts[0, 21 : 21 + right].tolist(), *[5] * (guesses - right)))
        logits = model.feed([(1, 0, 3), (0, 20, 1)], {0: draft})[1]
        found[f"{guesses} guesses"] = logits[: right + 1]
    tree, branch = TREE
    tokens = list(tree.tokens)
    for depth, node in enumerate(branch):
        tokens[node] = int(model.texts[0, 25 + depth])
    model.slots.tokens[0, :LENGTH] = model.texts[0]
    model.feed([(0, 0, 22)])
    model.known(25)
    logits = model.feed([(0, 22, 3), (2, 0, 1)], {0: Draft(tuple(tokens), tree.parents)})[0]
    found["tree"] = logits[[0, 1, 2, *(3 + node for node in branch)]]
    model.slots.tokens[0, :LENGTH] = model.texts[0]
    return found


FIRST = {"tree": 22}
"""The first position of what is not computed from the beginning."""


def check(found: Table, expected_LV: torch.Tensor) -> None:
    for name, logits in found.items():
        first = FIRST.get(name, 20 if "guesses" in name else 0)
        wanted = expected_LV[first : first + len(logits)]
        assert torch.equal(bits(logits), bits(wanted)), f"{name}: {(logits != wanted).any(1).sum()} positions differ"


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_same_bits_however_they_are_computed(family: str, tmp_path: Path) -> None:
    found = ways(Model(build(family, tmp_path, vocab_size=VOCAB)))
    assert found["prefill"].isfinite().all()
    assert len(found) == 7
    check(found, found["prefill"])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_still_the_model(family: str, tmp_path: Path) -> None:
    """The same bits in every way could be the same mistake."""
    model = Model(folder := build(family, tmp_path, vocab_size=VOCAB), "float32")
    exact = reference_logits(folder, [model.texts[0]], "eager")[0]
    assert (model.feed([(0, 0, LENGTH)])[0] - exact).abs().max() <= 2e-5 * exact.abs().max()


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_in_other_dtypes(family: str, dtype: str, tmp_path: Path) -> None:
    model = Model(folder := build(family, tmp_path, vocab_size=VOCAB), dtype)
    found = ways(model)
    check(found, found["prefill"])
    exact = reference_logits(folder, [model.texts[0]], "eager")[0]
    error = (found["prefill"] - exact).abs()
    if dtype == "float32":
        assert error.max() <= 2e-5 * exact.abs().max()
    else:
        assert error.mean() <= 0.01 * exact.abs().max()


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=() if family in SPLIT_QUICKLY else pytest.mark.full) for family in FAMILIES]
)
def test_two_ranks_say_the_same_bits(family: str, tmp_path: Path) -> None:
    on_two_ranks(build(family, tmp_path, vocab_size=VOCAB))


def on_two_ranks(folder: Path, *, is_listed: bool = False) -> None:
    expected = Model(folder).feed([(0, 0, LENGTH)])[0]

    def work(group: Group) -> Table:
        model = Model(folder, group=group)
        if is_listed:
            assert "operators traced in" in model.runner.warm_up()
        whole = model.feed([(0, 0, LENGTH)])[0]
        several = model.feed([(1, 0, 5), (0, 0, 30), (3, 0, 2)])[1]
        decoded = [model.feed([(0, at, 1)])[0] for at in range(30, LENGTH)]
        return {"prefill": whole, "among": torch.cat([several, *decoded])}

    check(in_memory(2, work)[0], expected)


def test_more_ranks_and_biases(tmp_path: Path) -> None:
    for number, (family, changes) in enumerate(
        (("llama", {"attention_bias": True, "mlp_bias": True}), ("opt", {}), ("gpt_oss", {}))
    ):
        folder = build(family, tmp_path / str(number), vocab_size=VOCAB, **changes)
        expected = Model(folder).feed([(0, 0, LENGTH)])[0]
        found = in_memory(4, lambda group, folder=folder: Model(folder, group=group).feed([(0, 0, LENGTH)])[0])
        check({"prefill": found[0]}, expected)


def traced(folder: Path) -> None:
    model, looked_at = Model(folder), Model(folder)
    note = model.runner.warm_up()
    assert note.startswith("batch-invariant, ")
    assert "operators traced in" in note
    check(ways(model), looked_at.feed([(0, 0, LENGTH)])[0])


@pytest.mark.parametrize("family", ["llama"])
def test_a_list_of_operators_says_the_same_bits(family: str, tmp_path: Path) -> None:
    traced(build(family, tmp_path, vocab_size=VOCAB, num_hidden_layers=1))


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if family in {"llama", "mixtral"} else pytest.mark.full) for family in FAMILIES],
)
def test_so_do_lists_of_two_ranks(family: str, tmp_path: Path) -> None:
    on_two_ranks(build(family, tmp_path, vocab_size=VOCAB), is_listed=True)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_a_list_of_operators_says_the_same_bits_for_every_family(family: str, tmp_path: Path) -> None:
    traced(build(family, tmp_path, vocab_size=VOCAB))


def test_an_input_taken_for_another_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing tells tensors apart by identity: positions that are the tokens' own tensor would be read as tokens."""
    traces = invariant.make_fx

    def confuse(forward: Callable[..., object], **options: object) -> Callable[..., object]:
        return lambda tokens, positions, wanted: traces(forward, **options)(tokens, tokens, wanted)

    monkeypatch.setattr(invariant, "make_fx", confuse)
    model = Model(build("llama", tmp_path, vocab_size=VOCAB, num_hidden_layers=1))
    expected = model.feed([(0, 0, LENGTH)])[0]
    assert model.runner.warm_up() == "batch-invariant, every operator checked: traced logits differ"
    check(ways(model), expected)


def test_a_rank_that_cannot_list_takes_part_in_the_others_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("llama", tmp_path, vocab_size=VOCAB, num_hidden_layers=1)
    expected = Model(folder).feed([(0, 0, LENGTH)])[0]
    lists = invariant._trace
    taken: list[str] = []

    def for_one(*given: Any) -> Any:
        taken.append("")
        return lists(*given) if len(taken) == 1 else (None, "tracing failed: made up")

    monkeypatch.setattr(invariant, "_trace", for_one)

    def work(group: Group) -> tuple[str, torch.Tensor]:
        model = Model(folder, group=group)
        return model.runner.warm_up(), model.feed([(0, 0, LENGTH)])[0]

    found = in_memory(2, work)
    notes = sorted(note for note, _ in found)
    assert "operators traced in" in notes[0]
    assert notes[1] == "batch-invariant, every operator checked: tracing failed: made up"
    check({"prefill": found[0][1]}, expected)


def test_a_list_that_is_wrong_on_a_rank_without_logits_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = build("llama", tmp_path, vocab_size=VOCAB, num_hidden_layers=1)
    expected = Model(folder).feed([(0, 0, LENGTH)])[0]
    traces, here = invariant.make_fx, threading.local()

    def confuse(forward: Callable[..., object], **options: object) -> Callable[..., object]:
        trace = traces(forward, **options)
        return lambda tokens, positions, wanted: trace(tokens, tokens if here.rank else positions, wanted)

    monkeypatch.setattr(invariant, "make_fx", confuse)

    def work(group: Group) -> tuple[str, torch.Tensor]:
        here.rank = group.rank
        model = Model(folder, group=group)
        return model.runner.warm_up(), model.feed([(0, 0, LENGTH)])[0]

    found = in_memory(2, work)
    assert {note for note, _ in found} == {"batch-invariant, every operator checked: traced logits differ"}
    check({"prefill": found[0][1]}, expected)


def test_without_it_bits_differ(tmp_path: Path) -> None:
    """Else nothing here would prove anything."""
    model = Model(build("llama", tmp_path, vocab_size=VOCAB))
    plain = load(ModelConfig(model=str(tmp_path), device="cpu", dtype="bfloat16"))
    model.runner = ModelRunner(plain, model.slots, model.runner.cache.num_blocks, BLOCK)
    found = ways(model)
    with pytest.raises(AssertionError, match="positions differ"):
        check(found, found["prefill"])


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    return str(caught.value)


def test_what_has_no_order_of_sums_is_not_split() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    message = refusal(lambda: in_memory(2, lambda group: sum_in_order(model, "0", group)))
    assert "cannot split 0 (LayerNorm) over ranks" in message
    assert "use tensor_parallel_size=1" in message


def test_ranks_that_cannot_share_the_parts_of_sums(tmp_path: Path) -> None:
    folder = build("llama", tmp_path, num_attention_heads=6, num_key_value_heads=6, hidden_size=48, vocab_size=VOCAB)
    message = refusal(lambda: in_memory(3, lambda group: Model(folder, group=group)))
    assert "8 parts, which 3 ranks cannot share: tensor_parallel_size must be 1, 2, 4 or 8" in message


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("llama", tmp_path, vocab_size=VOCAB)
    monkeypatch.setattr("shutil.which", lambda _: None)
    for cached in (load_function, invariant_native._function):
        cached.cache_clear()
    message = refusal(lambda: Model(folder))
    for cached in (load_function, invariant_native._function):
        cached.cache_clear()
    assert "there is no C++ compiler; install a C++ compiler or leave batch_invariant out" in message


def test_operators_that_are_not_known_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECIFIC, "llama", {"hidden_act": "mish"})
    message = refusal(lambda: Model(build("llama", tmp_path, vocab_size=VOCAB)))
    assert "(model_type 'llama'): batch_invariant: the model uses aten.mish, whose bits may depend on" in message


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.add(x, x, alpha=0.3),
        lambda x: x.index_put_((torch.zeros(3, dtype=torch.int64),), x, accumulate=True),
        lambda x: x.scatter(0, torch.zeros(x.shape, dtype=torch.int64), x, reduce="add"),
        lambda x: x.cumsum(0),
        lambda x: x.sum(),
        lambda x: x.pow(0.3),
        torch.linalg.vector_norm,
        lambda x: x.double().exp(),
        lambda x: x.unsqueeze(0) @ x.unsqueeze(0),
    ],
)
def test_what_could_sum_in_another_order_is_refused(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.inference_mode(), invariant.active(), pytest.raises(ConfigError, match="batch_invariant: the model"):
        work(torch.ones(3, 3))


def test_what_is_exact_is_left_alone() -> None:
    x = torch.arange(6.0).view(2, 3)
    with torch.inference_mode(), invariant.active():
        counted = x + x - x * 2 + x.cumsum(0, dtype=torch.int64)
        total, mean = x.sum(1), x.mean(-1, keepdim=True)
    assert counted.tolist() == [[0.0, 1.0, 2.0], [3.0, 5.0, 7.0]]
    assert total.tolist() == [3.0, 12.0]
    assert mean.tolist() == [[1.0], [4.0]]
