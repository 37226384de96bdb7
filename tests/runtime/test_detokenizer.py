"""Text as it streams, against what the tokenizers library says of the whole."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from protos.messages import TokenLogprobs
from protos.sampling import SamplingParams
from runtime.http.render import LogprobsWriter, TokenTexts
from runtime.text.detokenizer import Detokenizer, DetokenizerFactory
from tests.support.distributed.fake_worker import make_request

CORPUS = [
    "def naïve(x): return x  # déjà vu",
    "import os\n\nclass Zebra:\n    pass\n",
    "日本語のテキスト、例えば「東京」。",
    "emoji 😀😃👩‍👩‍👧 and flags 🇩🇪",
    "Привет, мир! ¿Qué tal? €100",
]


def train_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    tokenizer.add_tokens([AddedToken("日本 tool"), AddedToken("é!")])
    return tokenizer


def build_metaspace() -> Tokenizer:
    """Llama's kind: words begin with a bar, unknown characters fall back to bytes, the first space is stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "He", "llo", "!", "▁a", "b"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = train_byte_level()
METASPACE = build_metaspace()


def make(tokenizer: Tokenizer, prompt: Sequence[int] = (0,), **params: object) -> Detokenizer:
    made = DetokenizerFactory(tokenizer)(make_request("r", prompt, params=SamplingParams(**params)))
    assert made is not None
    return made


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


def stream(text: Detokenizer, ids: Sequence[int]) -> tuple[list[str], str | None]:
    """Feed ids one by one; return the text shown after each, then the rest, and the stop string met."""
    shown = []
    for token_id in ids:
        stop = text.push(token_id)
        if stop is not None:
            return [*shown, text.finish()], stop
        shown.append(text.take())
    return [*shown, text.finish()], None


def letters(text: str) -> list[int]:
    """One token a byte."""
    return [BYTE_LEVEL.token_to_id(c) for c in "".join(p for p, _ in BYTE_LEVEL.pre_tokenizer.pre_tokenize_str(text))]


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


@settings(max_examples=300, deadline=None)
@given(text=st.text("日é😀\u200d", min_size=1, max_size=8), data=st.data())
def test_a_character_that_began_in_the_prompt_is_whole_in_the_answer(text: str, data: st.DataObject) -> None:
    ids = METASPACE.encode(text, add_special_tokens=False).ids
    cut = data.draw(st.integers(1, len(ids) - 1))
    pieces, _ = stream(make(METASPACE, [METASPACE.token_to_id("b"), *ids[:cut]]), ids[cut:])
    num_whole = len(text.encode()[:cut].decode(errors="ignore"))
    assert "".join(pieces) == text[num_whole:]


@pytest.mark.parametrize(("answer", "shown"), [(["▁world", "!"], " world!"), ([], ""), (["<0x97>", "<0xA5>"], "日")])
def test_a_character_that_is_not_continued_is_the_prompts(answer: list[str], shown: str) -> None:
    prompt, ids = ([METASPACE.token_to_id(each) for each in some] for some in (["▁Hello", "<0xE6>"], answer))
    pieces, _ = stream(make(METASPACE, prompt), ids)
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


def test_names_of_bytes_are_text_without_byte_fallback() -> None:
    tokenizer = Tokenizer(models.WordLevel({"<0xE6>": 0, "b": 1}, unk_token="b"))
    tokenizer.decoder = decoders.Fuse()
    assert stream(make(tokenizer, [1]), [0, 1])[0] == ["<0xE6>", "b", ""]


def test_stop_text_is_cut_and_its_beginning_never_shown() -> None:
    shown, stop = stream(make(BYTE_LEVEL, stop=["<END>"]), letters("a<b<EN<END>rest"))
    assert stop == "<END>"
    assert "".join(shown) == "a<b<EN"
    assert shown[:6] == ["a", "", "<b", "", "", ""]
    shown, _ = stream(make(BYTE_LEVEL, stop=["<END>"], include_stop_str_in_output=True), letters("a<END>rest"))
    assert "".join(shown) == "a<END>"


def test_what_only_looked_like_a_stop_string_is_shown_at_the_end() -> None:
    shown, stop = stream(make(BYTE_LEVEL, stop=["<END>"]), letters("x<EN"))
    assert (stop, shown[-1], "".join(shown)) == (None, "<EN", "x<EN")


def test_the_earliest_of_several_matches_wins() -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"xyzab": 0, "q": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    shown, stop = stream(make(tokenizer, stop=["b", "za", "zab", "nope"]), [1, 0])
    assert (stop, "".join(shown)) == ("za", "qxy")


def test_text_within_min_tokens_is_not_searched_but_may_begin_a_match() -> None:
    shown, stop = stream(make(BYTE_LEVEL, stop=["ab"], min_tokens=2), letters("abab"))
    assert (stop, "".join(shown)) == ("ab", "ab")
    shown, stop = stream(make(BYTE_LEVEL, stop=["bc"], min_tokens=2), letters("abcd"))
    assert (stop, "".join(shown)) == ("bc", "a")


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab<é", max_size=20),
    stops=st.lists(st.text("ab<é", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_against_searching_every_prefix(text: str, stops: list[str]) -> None:
    shown, stop = stream(make(BYTE_LEVEL, stop=stops), letters(text))
    for end in range(len(text) + 1):
        found = [(text[:end].find(s), i) for i, s in enumerate(stops) if text[:end].find(s) >= 0]
        if found:
            start, which = min(found)
            assert (stop, "".join(shown)) == (stops[which], text[:start])
            return
    assert (stop, "".join(shown)) == (None, text)


def test_no_text_where_none_is_wanted_or_possible() -> None:
    request = make_request("r", [0], params=SamplingParams(detokenize=False))
    assert DetokenizerFactory(BYTE_LEVEL)(request) is None
    assert DetokenizerFactory(None)(make_request("r", [0])) is None


def test_nothing_is_taken_after_a_stop_string() -> None:
    text = make(BYTE_LEVEL, stop=["a"])
    assert text.push(letters("a")[0]) == "a"
    with pytest.raises(RuntimeError, match="after a stop string"):
        text.push(0)
