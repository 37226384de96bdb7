"""A draft with another tokenizer drafts as well as its text allows, and changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from protos.errors import ConfigError, ModelError
from slipstream import LLM, SamplingParams
from tests.support.identity import collect
from tests.support.models import tiny_models, tiny_pairs
from tests.support.policies import always
from workers.draft.vocab_map import VocabMap

PROMPTS = ["def main():", "for i in range(10):\n    print(", "import os, sys", "x = ["]
PARAMS = [SamplingParams(max_tokens=20, temperature=0.8 * (i % 2), seed=i, ignore_eos=True) for i in range(4)]


def shuffled(source: Path, folder: Path, dropped: int = 0) -> Path:
    """Write a copy of the model in *source* whose ids are shuffled, with other special tokens and *dropped* texts."""
    own = PreTrainedTokenizerFast.from_pretrained(source)
    vocab = own.get_vocab()
    order = torch.randperm(len(vocab), generator=torch.Generator().manual_seed(4)).tolist()
    by_id = sorted(vocab, key=lambda token: vocab[token])
    moved = {by_id[old]: new for new, old in enumerate(order)}
    for token in [token for token in by_id if token not in tiny_pairs.SPECIAL][:dropped]:
        moved[f"\u0100{token}\u0100"] = moved.pop(token)
    backend = Tokenizer(models.BPE(vocab=moved, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(tiny_pairs.SPECIAL))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        for weight in {
            id(w): w for w in (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
        }.values():
            weight.copy_(weight[order].clone())
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return tiny_pairs.build(tmp_path_factory.mktemp("pair"), "llama")


def run(target: Path, draft: Path | None, **options: Any) -> Any:
    speculative = (
        None
        if draft is None
        else {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3, **options}
    )
    with LLM(model=str(target), dtype="float32", enforce_eager=True, speculative_config=always(speculative)) as llm:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(target)
        return collect(llm, [tokenizer.encode(prompt) for prompt in PROMPTS], PARAMS)


def test_a_shuffled_draft_drafts_the_same(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Greedy and seeded: the noise is that of the target's ids, so the same draft tokens are accepted."""
    target, draft = pair
    plain, straight = run(target, None), run(target, draft)
    other = run(target, shuffled(draft, tmp_path / "shuffled"), use_heterogeneous_vocab=True)
    assert other.outputs == straight.outputs == plain.outputs
    assert (other.proposed, other.accepted) == (straight.proposed, straight.accepted)
    other.assert_speculated()


def test_a_draft_that_lacks_texts_changes_nothing(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    other = run(target, shuffled(draft, tmp_path / "poorer", dropped=60), use_heterogeneous_vocab="True")
    assert other.outputs == run(target, None).outputs
    other.assert_speculated()


def test_another_tokenizer_is_refused_unless_configured(pair: tuple[Path, Path], tmp_path: Path) -> None:
    target, draft = pair
    with pytest.raises(ModelError, match="use_heterogeneous_vocab"):
        run(target, shuffled(draft, tmp_path / "shuffled"))
    with (
        pytest.raises(ConfigError, match="draft_model"),
        LLM(model=str(target), speculative_config={"method": "ngram", "use_heterogeneous_vocab": True}),
    ):
        pass


def write_tokenizer(folder: Path, vocab: list[str], decoder: Any, specials: list[str]) -> Path:
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=[], unk_token="<unk>"))
    backend.decoder = decoder
    backend.add_special_tokens(specials)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def test_tokens_meet_by_the_text_they_stand_for(tmp_path: Path) -> None:
    """Byte-level and sentencepiece spell spaces, bytes and letters beyond ASCII in ways of their own."""
    ours = ["<unk>", "\u0120the", "the", "\u010a", "caf\u00c3\u00a9", "<eos>", "zzz"]
    theirs = ["<eos>", "<unk>", "the", "\u2581the", "<0x0A>", "caf\u00e9", "<s>"]
    target = write_tokenizer(tmp_path / "target", ours, decoders.ByteLevel(), ["<eos>"])
    spelt = decoders.Sequence([decoders.ByteFallback()])
    draft = write_tokenizer(tmp_path / "draft", theirs, spelt, ["<eos>", "<unk>"])
    found = VocabMap.of_tokenizers(target, draft, vocab_size=9, draft_size=7)
    assert found.to_draft_V.tolist() == [1, 3, 2, 4, 5, 0, 1, 1, 1]
    assert dict(zip(found.target_S.tolist(), found.draft_S.tolist(), strict=True)) == {1: 3, 2: 2, 3: 4, 4: 5, 5: 0}


def test_ids_that_a_model_has_no_row_for_are_unused(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", ["a", "b", "c", "<pad>"], decoders.ByteLevel(), ["<pad>"])
    draft = write_tokenizer(tmp_path / "draft", ["c", "a", "<pad>", "<unk>"], decoders.ByteLevel(), ["<pad>", "<unk>"])
    found = VocabMap.of_tokenizers(target, draft, vocab_size=4, draft_size=2)
    assert found.to_draft_V.tolist() == [1, 0, 0, 0]
    assert found.draft_S.tolist() == [1, 0]


def test_tokenizers_that_share_nothing_are_refused(tmp_path: Path) -> None:
    target = write_tokenizer(tmp_path / "target", ["a"], decoders.ByteLevel(), [])
    draft = write_tokenizer(tmp_path / "draft", ["b"], decoders.ByteLevel(), [])
    with pytest.raises(ModelError, match="share no token"):
        VocabMap.of_tokenizers(target, draft, 1, 1)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        VocabMap.of_tokenizers(target, tiny_models.build("llama", tmp_path / "bare"), 1, 1)
