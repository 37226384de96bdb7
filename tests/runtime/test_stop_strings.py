"""Stop strings in text as it streams."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from tests.support.text.detokenizing import BYTE_LEVEL, letters, make, stream


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


def test_nothing_is_taken_after_a_stop_string() -> None:
    text = make(BYTE_LEVEL, stop=["a"])
    assert text.push(letters("a")[0]) == "a"
    with pytest.raises(RuntimeError, match="after a stop string"):
        text.push(0)
