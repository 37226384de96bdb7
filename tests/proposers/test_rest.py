"""REST: a datastore is built from files, finds what a naive search finds, and refuses what does not fit."""

import json
import logging
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cluster import assemble
from cluster.cli import main as cli
from proposers.rest import RestProposer
from proposers.shared.datastore import DEPTH, FEW_CONTEXTS, NEIGHBOURS, Datastore, fingerprint, write
from protos.config.engine import ModelConfig, SpeculativeConfig
from protos.draft import DraftRow
from protos.errors import ConfigError
from runtime.text.tokenizer import load_tokenizer
from tests.support.models import tiny_pairs

TOKENIZER = b"t" * 32
TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=8)


def places_of(texts: list[list[int]], context: list[int], size: int) -> list[list[int]]:
    """Return the continuation of each occurrence of the last *size* tokens of *context*."""
    return [text[end:] for text in texts for end in range(size, len(text)) if text[end - size : end] == context[-size:]]


@settings(deadline=None)
@given(
    texts=TEXTS,
    contexts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=24), min_size=1, max_size=5),
    shift=st.sampled_from([0, 65_530]),
)
def test_a_datastore_finds_what_a_naive_search_finds(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], contexts: list[list[int]], shift: int
) -> None:
    texts = [[token + shift for token in text] for text in texts]
    contexts = [[token + shift for token in context] for context in contexts]
    path = tmp_path_factory.mktemp("datastore") / "store"
    if not any(len(text) > 1 for text in texts):
        with pytest.raises(ConfigError, match="holds 1 to"):
            write(path, texts, TOKENIZER)
        return
    write(path, texts, TOKENIZER)
    store = Datastore(path)
    together = store.longest(contexts * (FEW_CONTEXTS + 1))
    assert together == [store.longest([context])[0] for context in contexts] * (FEW_CONTEXTS + 1)
    for context, found in zip(contexts, together, strict=False):
        sizes = range(min(DEPTH, len(context)), 0, -1)
        length = next((size for size in sizes if places_of(texts, context, size)), 0)
        assert found.length == length
        if length:
            wanted = sorted(places_of(texts, context, length))
            followed = sorted(store.after(found.places, 100))
            assert followed == wanted or len(wanted) > NEIGHBOURS
            assert all(text in wanted for text in followed)


def proposer(tmp_path: Path, texts: list[list[int]], **keys: object) -> RestProposer:
    write(tmp_path / "store", texts, TOKENIZER)
    fields = {"method": "rest", "num_speculative_tokens": 6, "datastore": str(tmp_path / "store"), **keys}
    return RestProposer.create(SpeculativeConfig(**fields), None)


def test_the_best_nodes_of_all_continuations_are_the_draft(tmp_path: Path) -> None:
    texts = [[1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 6], [1, 2, 7], [9, 2, 8, 8]]
    rest = proposer(tmp_path, texts)
    [draft, short, none] = rest.propose([DraftRow(0, 4, [5, 1, 2]), DraftRow(1, 1, [5, 1, 2]), DraftRow(2, 4, [1, 5])])
    # "1 2" is followed by 3 twice and by 7 once, "3" by 4 twice.
    nodes = set(zip(draft.tokens, draft.parents, strict=True))
    assert draft.tokens[:2] == (3, 4)
    assert {(3, -1), (4, 0), (7, -1)} <= nodes
    assert len(draft) == 4
    assert (short.tokens, none.tokens) == ((3,), ())
    [straight] = proposer(tmp_path, texts, draft_shape="chain").propose([DraftRow(0, 4, [5, 1, 2])])
    assert (straight.tokens[:2], straight.parents) == ((3, 4), ())
    assert not proposer(tmp_path, texts, method=("rest", "draft_model")).propose([DraftRow(0, 1, [5, 1, 2])])[0]


def test_a_store_of_some_thousand_texts_finds_long_matches(tmp_path: Path) -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(300) for _ in range(100)] for _ in range(2000)]
    write(tmp_path / "store", texts, TOKENIZER)
    store = Datastore(tmp_path / "store")
    found = store.longest([text[20:50] for text in texts[:64]])
    assert {one.length for one in found} == {DEPTH}
    assert store.after([one.places[0] for one in found], 8) == [text[50:58] for text in texts[:64]]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with pytest.raises(ConfigError, match="cannot read the datastore"):
        Datastore(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match="was not written by `slipstream build-datastore`"):
        Datastore(path)
    write(path, [[1, 2, 3]], TOKENIZER)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="must have"):
        Datastore(path)
    with pytest.raises(ConfigError, match="needs a datastore"):
        RestProposer.create(SpeculativeConfig("rest", 4), None)


def test_the_command_builds_one_and_a_foreign_tokenizer_is_noticed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, _ = tiny_pairs.build(tmp_path)
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.py").write_text("def f():\n    return 1\n" + "#" * 2000, encoding="utf-8-sig")
    (folder / "deep" / "b.txt").write_text("def g():\n    return 2\n")
    (folder / ".hidden").write_text("no")
    (folder / "noise.bin").write_bytes(b"\xff\xfe\x00\x80")
    store = tmp_path / "store"
    stored = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**stored, "model_max_length": 64}))
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    result = CliRunner().invoke(
        cli.app, ["build-datastore", str(folder), "--model", str(target), "--output", str(store)]
    )
    assert result.exit_code == 0, result.output
    assert "of 2 texts" in result.stderr
    assert "noise.bin: UnicodeDecodeError" in result.stderr
    assert "sequence length" not in caplog.text
    tokenizer = load_tokenizer(ModelConfig(str(target)))
    assert tokenizer is not None
    [found] = Datastore(store).longest([tokenizer.encode("x return ", add_special_tokens=False)])
    assert found.length == len(" return ")
    assert len(found.places) == 2
    [mark] = Datastore(store).longest([tokenizer.encode("\ufeff", add_special_tokens=False)])
    assert mark.length == 0
    assemble.check_datastore(str(store), tokenizer)
    write(store, [[1, 2, 3]], fingerprint({"other": 0}))
    with pytest.raises(ConfigError, match="another tokenizer"):
        assemble.check_datastore(str(store), tokenizer)
