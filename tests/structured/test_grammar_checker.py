"""Grammars are compiled in a process with limits on time and memory."""

import os
import signal
import threading
from typing import Any

import pytest

from protos.errors import InvalidRequestError, OverloadedError
from protos.messages import Grammar
from protos.structured import StructuredOutputsParams
from runtime.text.grammar_validator import GrammarChecker, GrammarLimits
from tests.support.structured import EOS, FORMS, tokenizer, vocab_size

# Valid parameters with meaningless grammars.
MEANINGLESS: dict[str, tuple[dict[str, Any], str]] = {
    "an open bracket": ({"regex": "a("}, "unclosed group"),
    "a look-around": ({"regex": "(?=a)b"}, "look-around"),
    "a back-reference": ({"regex": r"(a)\1"}, "backreferences are not supported"),
    "an unknown type": ({"json": {"type": "objekt"}}, "objekt"),
    "a key that is not followed": ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
    "contradictions": ({"json": {"type": "integer", "minimum": 5, "maximum": 1}}, "Unsatisfiable"),
    "nothing but itself": ({"json": {"$ref": "#"}}, "no text can satisfy it"),
    "a file": ({"json": {"$ref": "file:///etc/hostname"}}, "does not fetch resources"),
    "no start": ({"grammar": 'begin: "a"'}, "start"),
    "an unknown rule": ({"grammar": "start: rest"}, 'unknown name: "rest"'),
    "a pattern of whitespace": ({"json": {}, "whitespace_pattern": "("}, "unclosed group"),
}


@pytest.fixture(scope="module")
def checker() -> Any:
    found = GrammarChecker(tokenizer(), vocab_size(), (EOS,))
    yield found
    found.close()


@pytest.mark.parametrize("case", MEANINGLESS)
def test_what_means_nothing(case: str, checker: GrammarChecker) -> None:
    asked, said = MEANINGLESS[case]
    for _ in range(2):  # found out, and remembered
        with pytest.raises(InvalidRequestError) as caught:
            checker.resolve(StructuredOutputsParams(**asked))
        assert caught.value.param == "structured_outputs"
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", FORMS)
def test_what_means_something(name: str, checker: GrammarChecker) -> None:
    assert checker.resolve(StructuredOutputsParams(**FORMS[name].asked)) == FORMS[name].grammar


def test_grammars_need_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="skip_tokenizer_init"):
        GrammarChecker(None, 5, ()).resolve(StructuredOutputsParams(regex="a"))


HARD = Grammar("regex", "x(a{1000}){1000}")
EASY = Grammar("regex", "b+")


def test_a_grammar_that_takes_too_long_costs_its_request_alone() -> None:
    checker = GrammarChecker(tokenizer(), vocab_size(), (EOS,), GrammarLimits(time_s=0.5))
    checker.check(Grammar("regex", "a+"))
    first = checker._process
    assert first is not None
    with pytest.raises(InvalidRequestError, match=r"took more than 0\.5 s"):
        checker.check(HARD)
    assert not first.is_alive
    checker.limits = GrammarLimits()
    checker.check(EASY)
    checker.close()


def test_a_process_that_dies_is_replaced() -> None:
    checker = GrammarChecker(tokenizer(), vocab_size(), (EOS,))
    checker.check(EASY)
    assert checker._process is not None
    os.kill(checker._process._popen.pid, signal.SIGSTOP)  # so that it dies while a caller waits
    threading.Timer(0.3, checker._process._popen.kill).start()
    with pytest.raises(InvalidRequestError, match="too complex"):
        checker.check(Grammar("regex", "c+"))
    checker.check(Grammar("regex", "d+"))
    checker.close()


def test_memory_is_limited() -> None:
    checker = GrammarChecker(tokenizer(), vocab_size(), (EOS,), GrammarLimits(time_s=120, memory_bytes=8 << 20))
    with pytest.raises(InvalidRequestError, match="more than 8 MiB"):
        checker.check(HARD)
    checker.check(EASY)
    checker.close()


def test_whoever_waits_too_long_is_told_when_to_come_back() -> None:
    checker = GrammarChecker(tokenizer(), vocab_size(), (EOS,), GrammarLimits(wait_s=0.05))
    with checker._lock, pytest.raises(OverloadedError) as caught:
        checker.check(EASY)
    assert caught.value.retry_after_s > 0


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker) -> None:
    monkeypatch.setattr("runtime.text.grammar_validator.CACHE_SIZE", 3)
    for i in range(6):
        checker.check(Grammar("regex", f"x{i}"))
    assert len(checker._refusals) <= max(3, len(FORMS) + len(MEANINGLESS) + 3)
    before = len(checker._refusals)
    checker.check(Grammar("regex", "y"))
    assert len(checker._refusals) == before
