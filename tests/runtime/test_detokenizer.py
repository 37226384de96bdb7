"""Text as it streams, against what the tokenizers library says of the whole."""

import itertools
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from protos.messages import TokenLogprobs
from protos.sampling import SamplingParams
from runtime.http.render import LogprobsWriter, TokenTexts
from runtime.text.detokenizer import DetokenizerFactory
from runtime.text.pieces import WindowPieces, joins
from tests.support.distributed.fake_worker import make_request
from tests.support.text.detokenizing import BYTE_LEVEL, CORPUS, METASPACE, build_metaspace, letters, make, stream


def test_texts_of_single_tokens_keep_their_space() -> None:
    made: Any = PreTrainedTokenizerFast(tokenizer_object=METASPACE, bos_token="<s>", eos_token="</s>")
    texts = TokenTexts(made)
    spelt = ["▁Hello", "▁world", "He", "llo", "▁", "!", "▁a", "b", "<s>", "<0xC3>", "<0x0A>"]
    told = [" Hello", " world", "He", "llo", " ", "!", " a", "b", "<s>", "\ufffd", "\n"]
    assert [texts[METASPACE.token_to_id(token)] for token in spelt] == told
    byte_level = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL))
    ids = [token for token in BYTE_LEVEL.encode("the quick  brown").ids if token > 1]
    assert "".join(byte_level[token] for token in ids) == "the quick  brown"


def test_parts_of_characters_have_bytes() -> None:
    """With which a client joins the text of tokens again."""
    for tokenizer in (BYTE_LEVEL, METASPACE):
        made: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
        texts = TokenTexts(made)
        ids = made.encode("é😀 a", add_special_tokens=False)
        assert any("\ufffd" in texts[token_id] for token_id in ids)
        assert b"".join(bytes(texts.bytes_of(token_id)) for token_id in ids).decode().strip() == "é😀 a"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte level", "metaspace"])
@pytest.mark.parametrize("skips", [True, False])
def test_offsets_of_tokens_agree_with_the_text(tokenizer: Tokenizer, skips: bool) -> None:
    made: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    writer = LogprobsWriter(TokenTexts(made), 0, skips_special=skips)
    prompt, answer, more = (made.encode(each, add_special_tokens=False) for each in ("é😀b", "bé", "😀b"))
    entries = [TokenLogprobs([token], [0.0], [1]) for token in [*prompt, *answer, made.eos_token_id, *more]]
    found = writer.completion(entries, [made.bos_token_id, *prompt], "é😀b")
    text = "é😀bbé" + "</s>" * (not skips) + "😀b"
    placed = [*zip(found.tokens, found.text_offset, strict=True)]
    assert [offset for token, offset in placed if token == "b"] == [at for at, char in enumerate(text) if char == "b"]
    assert {text[offset] for token, offset in placed if token == "\ufffd"} <= {"é", "😀"}
    assert [offset for _, offset in placed] == sorted(offset for _, offset in placed)


def test_a_prompt_begins_with_what_the_tokenizer_puts_before_it() -> None:
    made: Any = PreTrainedTokenizerFast(tokenizer_object=METASPACE, bos_token="<s>", eos_token="</s>")
    ids = [METASPACE.token_to_id(token) for token in ("<s>", "▁Hello", "!", "▁world")]
    entries = [TokenLogprobs([token], [0.0], [1]) for token in ids[1:]]
    assert LogprobsWriter(TokenTexts(made), 0).completion(entries, ids[:3], "Hello!").text_offset == [0, 0, 5, 6]
    echoed = "<s> Hello!"
    assert LogprobsWriter(TokenTexts(made), 0).completion(entries, ids[:3], echoed).text_offset == [0, 3, 9, 10]


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 3), max_size=30), skip=st.booleans())
def test_any_byte_level_ids_stream_to_their_full_decode(ids: list[int], skip: bool) -> None:
    shown, _ = stream(make(BYTE_LEVEL, skip_special_tokens=skip), ids)
    assert "".join(shown) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


def test_agrees_with_transformers() -> None:
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=BYTE_LEVEL, bos_token="<s>", eos_token="</s>")
    for text in CORPUS:
        ids = fast(text + "</s>")["input_ids"]
        for skip in (True, False):
            shown, _ = stream(make(fast.backend_tokenizer, skip_special_tokens=skip), ids)
            assert "".join(shown) == fast.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", CORPUS)
def test_no_character_is_split(text: str) -> None:
    shown, _ = stream(make(BYTE_LEVEL), BYTE_LEVEL.encode(text).ids)
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_an_incomplete_character_is_held_back_until_the_end() -> None:
    ids = letters("😀")
    shown, _ = stream(make(BYTE_LEVEL), ids[:3])
    assert shown == ["", "", "", "\ufffd"]
    shown, _ = stream(make(BYTE_LEVEL), [*ids[:2], BYTE_LEVEL.token_to_id("a")])
    assert shown == ["", "", "\ufffda", ""]


def test_metaspace_keeps_the_space_after_the_prompt() -> None:
    to_id = METASPACE.token_to_id
    prompt = [to_id("<s>"), to_id("▁Hello")]
    shown, _ = stream(make(METASPACE, prompt), [to_id("▁world"), to_id("▁a"), to_id("!")])
    assert shown == [" world", " a", "!", ""]
    shown, _ = stream(make(METASPACE, [to_id("<s>")]), [to_id("▁Hello"), to_id("▁world")])
    assert shown == ["Hello", " world", ""]


def test_byte_fallback_shows_whole_characters_only() -> None:
    to_id = METASPACE.token_to_id
    ids = [to_id("▁a"), *(to_id(f"<0x{byte:02X}>") for byte in "€".encode()), to_id("b")]
    shown, _ = stream(make(METASPACE, [to_id("▁Hello")]), ids)
    assert shown == [" a", "", "", "€", "b", ""]
    shown, _ = stream(make(METASPACE, [to_id("▁Hello")]), ids[:3])
    assert shown == [" a", "", "", "\ufffd\ufffd"]


@settings(max_examples=300, deadline=None)
@example(prompt="b", answer="�" * 5 + "日")
@given(prompt=st.text("b日é😀\u200d�", min_size=1, max_size=6), answer=st.text("b日é😀\u200d�!", max_size=12))
def test_characters_in_single_bytes_follow_a_prompt_of_such(prompt: str, answer: str) -> None:
    """The context of the answer may not begin within a character; the replacement character is one like others."""
    first = METASPACE.token_to_id("▁Hello")
    ids, before = (METASPACE.encode(text, add_special_tokens=False).ids for text in (answer, prompt))
    pieces, _ = stream(make(METASPACE, [first, *before]), ids)
    assert "".join(pieces) == answer


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte level", "metaspace"])
@settings(max_examples=300, deadline=None)
@given(text=st.text("日é😀\u200d", min_size=1, max_size=8), data=st.data())
def test_a_character_that_began_in_the_prompt_is_whole_in_the_answer(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = letters(text) if tokenizer is BYTE_LEVEL else METASPACE.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(1, len(ids) - 1))
    pieces, _ = stream(make(tokenizer, [tokenizer.token_to_id("b"), *ids[:cut]]), ids[cut:])
    num_whole = len(text.encode()[:cut].decode(errors="ignore"))
    assert "".join(pieces) == text[num_whole:]


@pytest.mark.parametrize(("answer", "shown"), [(["▁world", "!"], " world!"), ([], ""), (["<0x97>", "<0xA5>"], "日")])
def test_a_character_that_is_not_continued_is_the_prompts(answer: list[str], shown: str) -> None:
    prompt, ids = ([METASPACE.token_to_id(each) for each in some] for some in (["▁Hello", "<0xE6>"], answer))
    pieces, _ = stream(make(METASPACE, prompt), ids)
    assert "".join(pieces) == shown


@pytest.mark.parametrize(("answer", "shown"), [(" wo!", " wo!"), ("", ""), ("</s>", "")])
def test_bytes_that_are_not_continued_are_the_prompts(answer: str, shown: str) -> None:
    ids = [BYTE_LEVEL.token_to_id(answer)] if answer == "</s>" else letters(answer)
    pieces, _ = stream(make(BYTE_LEVEL, letters("日")[:2]), ids)
    assert "".join(pieces) == shown


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (["<0xFF>"] * 3, ["�", "�", "�", ""]),
        (["<0xC3>", "<0xA9>", "<0xFF>", "b"], ["", "é", "�", "b", ""]),
        (["<0xE6>", "<0x97>", "<0xC3>", "<0xA9>"], ["", "", "��", "é", ""]),
        (["<0xE6>", "<0x97>", "</s>", "<0xA5>"], ["", "", "", "日", ""]),
        (["<0xE6>", "<0x97>", "▁a"], ["", "", "�� a", ""]),
    ],
)
def test_bytes_of_no_character_are_shown_at_once(answer: list[str], shown: list[str]) -> None:
    prompt, ids = ([METASPACE.token_to_id(each) for each in some] for some in (["▁Hello"], answer))
    assert stream(make(METASPACE, prompt), ids)[0] == shown


SPACES = decoders.Replace("▁", " ")
STRIPPED = decoders.Strip(" ", 1, 0)
WORDS = ["▁Hello", "▁world", "He", "llo", "!", "▁a", "b", "▁"]


@pytest.mark.parametrize(
    ("parts", "by_itself"),
    [
        ([SPACES, decoders.ByteFallback(), decoders.Fuse(), STRIPPED], True),  # Llama 2, Mistral
        ([SPACES, decoders.ByteFallback(), decoders.Fuse()], True),  # Gemma
        ([decoders.Metaspace()], True),
        ([decoders.WordPiece("He", cleanup=False)], False),
    ],
)
@pytest.mark.parametrize("prompt", [["▁Hello"], ["<s>"], ["b", "</s>"]])
def test_words_of_every_kind_stream_to_their_full_decode(
    parts: list[Any], by_itself: bool, prompt: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = build_metaspace()
    tokenizer.decoder = decoders.Sequence(parts) if len(parts) > 1 else parts[0]
    monkeypatch.setattr(WindowPieces, "push", (forbidden if by_itself and prompt != ["<s>"] else WindowPieces.push))
    number: Any = tokenizer.token_to_id
    before = [number(each) for each in prompt]
    start = len(tokenizer.decode(before))
    for words in itertools.product(WORDS, ["</s>", *WORDS], WORDS):
        ids = [number(each) for each in words]
        shown, _ = stream(make(tokenizer, before), ids)
        assert "".join(shown) == tokenizer.decode([*before, *ids])[start:]


@pytest.mark.parametrize("whole", [decoders.Strip(" ", 0, 1), decoders.Replace("o▁", "O"), decoders.CTC()])
def test_tokens_whose_text_depends_on_others_do_not_join(whole: Any) -> None:
    tokenizer = build_metaspace()
    tokenizer.decoder = decoders.Sequence([SPACES, decoders.Fuse(), whole])
    assert not joins(tokenizer)


def forbidden(*_: object) -> str:
    raise AssertionError("a window of tokens was decoded")


def test_names_of_bytes_are_text_without_byte_fallback() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<0xE6>": 0, "b": 1}, unk_token="b"))
    tokenizer.decoder = decoders.Fuse()
    assert stream(make(tokenizer, [1]), [0, 1])[0] == ["<0xE6>", "b", ""]


def test_no_text_where_none_is_wanted_or_possible() -> None:
    request = make_request("r", [0], params=SamplingParams(detokenize=False))
    assert DetokenizerFactory(BYTE_LEVEL)(request) is None
    assert DetokenizerFactory(None)(make_request("r", [0])) is None
