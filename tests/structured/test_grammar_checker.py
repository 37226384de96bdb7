"""Grammars are compiled in a process with limits on time and memory."""

import os
import signal
import time
from typing import Any

import pytest

from protos.errors import InvalidRequestError
from protos.messages import Grammar
from protos.structured import StructuredOutputsParams
from runtime.text import grammar_validator
from runtime.text.grammar_validator import TOO_SLOW_S, GrammarChecker, GrammarLimits
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
"""Takes half a second of a fast processor, and EASY a hundredth."""
EASY = Grammar("regex", "b+")


def test_a_grammar_that_takes_too_long_costs_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = GrammarChecker(tokenizer(), vocab_size(), (EOS,), GrammarLimits(time_s=0.1, longest_s=60))
    with pytest.raises(InvalidRequestError, match=r"took more than 0\.1 s"):
        checker.check(HARD)
    checker.check(EASY)
    forks: list[int] = []
    monkeypatch.setattr(checker, "_fork", lambda: forks.append(1) or GrammarChecker._fork(checker))
    with pytest.raises(InvalidRequestError, match=r"took more than 0\.1 s"):
        checker.check(HARD)
    assert not forks, "it was found slow before"
    monkeypatch.setattr(grammar_validator.time, "monotonic", lambda now=time.monotonic: now() + TOO_SLOW_S)
    with pytest.raises(InvalidRequestError, match=r"took more than 0\.1 s"):
        checker.check(HARD)
    assert forks, "it is tried again after a while"
    checker.close()


def test_processes_that_die_are_replaced() -> None:
    checker = GrammarChecker(tokenizer(), vocab_size(), (EOS,))
    checker.check(EASY)
    first = checker._host._first
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    checker.check(Grammar("regex", "d+"))
    assert checker._host._first is not first
    checker.close()


def test_memory_is_limited() -> None:
    checker = GrammarChecker(
        tokenizer(), vocab_size(), (EOS,), GrammarLimits(time_s=120, longest_s=120, memory_bytes=8 << 20)
    )
    with pytest.raises(InvalidRequestError, match="more than 8 MiB"):
        checker.check(HARD)
    checker.check(EASY)
    checker.close()


def test_the_cache_is_bounded(monkeypatch: pytest.MonkeyPatch, checker: GrammarChecker) -> None:
    monkeypatch.setattr("runtime.text.grammar_validator.CACHE_SIZE", 3)
    for i in range(6):
        checker.check(Grammar("regex", f"x{i}"))
    assert len(checker._findings) <= max(3, len(FORMS) + len(MEANINGLESS) + 3)
    before = len(checker._findings)
    checker.check(Grammar("regex", "y"))
    assert len(checker._findings) == before
