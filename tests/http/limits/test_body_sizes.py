"""Limits on what request bodies contain, and uploads that break off."""

import json
import logging
import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.sampling import SamplingParams
from runtime.frontend.channel import Commands
from runtime.http import bodies
from runtime.http.errors import ApiError
from runtime.http.server.json_size import MAX_FIELDS, MAX_NESTING, MAX_VALUES, JsonSize
from runtime.text.preprocessor import Preprocessor
from tests.http.test_bad_input import POSTED, posted, refused
from tests.support.processes import wait_until
from tests.support.serving.fake_engine import EOS, bare_tokenizer, expected, tokenizer
from tests.support.serving.guarded_server import Guarded, guarded

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=20,
)
ODD_TEXTS = st.text('\\"[]{},:a\n', max_size=20)


@pytest.fixture(scope="module")
def served() -> Iterator[Guarded]:
    with guarded() as running:
        yield running


def counted(value: Any) -> tuple[int, int, int]:
    """Return the values, the lists, objects and fields, and the depth of *value*."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 1, 0, 0
    parts = [counted(each) for each in inner]
    fields = 1 + (len(value) if isinstance(value, dict) else 0) + sum(part[1] for part in parts)
    return 1 + sum(part[0] for part in parts), fields, 1 + max((part[2] for part in parts), default=0)


@settings(max_examples=50, deadline=None)
@given(st.one_of(JSON, st.dictionaries(ODD_TEXTS, ODD_TEXTS), st.lists(ODD_TEXTS)), st.integers(1, 9), st.booleans())
def test_values_fields_and_nesting_are_counted_in_parts_of_any_length(value: Any, length: int, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    size = JsonSize()
    for start in range(0, len(text), length):
        size.add(text[start : start + length])
    num_values, num_fields, nesting = counted(value)
    assert (size.num_fields, size.nesting) == (num_fields, nesting)
    assert num_values <= size.num_values <= num_values + num_fields  # an empty list counts as if it had a value


def test_what_exceeds_a_limit_is_refused_before_the_end_of_the_body() -> None:
    for text, status in ((b"1,", 413), (b'"a":1,', 413), (b"[]", 413), (b"[", 400)):
        size = JsonSize()
        with pytest.raises(ApiError, match=r"at most [0-9]+ .*got [0-9]+") as caught:
            for _ in range(100):
                size.add(text * 20_000)
        assert caught.value.status == status
    for text in (
        b"[" + b"1," * (MAX_VALUES - 2) + b"1]",
        b"[" * MAX_NESTING,
        b"[]" * MAX_FIELDS,
        b'"' + b"[{,:" * MAX_VALUES + b'"',
    ):
        JsonSize().add(text)


HUGE = {
    "nested lists": b'{"metadata": [%s]}' % b",".join([b"[]"] * 70_000),
    "unknown fields": b"{%s}" % b",".join(b'"%d":1' % i for i in range(70_000)),
    "biases": b'{"logit_bias": {%s}}' % b",".join(b'"%d":1' % i for i in range(70_000)),
    "ids": b'{"prompt": [%s]}' % b",".join([b"5"] * 1_300_000),
    "messages": b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":"a"}'] * 30_000),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_bodies_are_refused_by_every_route(served: Guarded, name: str) -> None:
    for path in POSTED:
        assert "the body must have at most" in refused(posted(served, path, HUGE[name]), 413)


def test_deep_bodies_are_refused_by_every_route(served: Guarded) -> None:
    for path in POSTED:
        message = refused(posted(served, path, b'{"metadata": ' + b"[" * 600 + b"]" * 600 + b"}"))
        assert message == "the body must be nested at most 512 levels deep, got 601"


def test_long_texts_of_marks_are_only_text(served: Guarded) -> None:
    message = refused(served.post(prompt='[{,:"\\' * 1_000_000))
    assert "characters" in message  # too long for the context, not too many values


def test_large_bodies_are_parsed_beside_the_event_loop(served: Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    parse = bodies._parsed

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return parse(*args)

    monkeypatch.setattr(bodies, "_parsed", noted)
    assert served.post(prompt="x", max_tokens=3, user="u" * 400_000).status_code == 200
    assert served.post(prompt="x", max_tokens=3).json()["choices"][0]["text"] == expected("x", 3)
    assert threads[0].startswith("slipstream-bodies")
    assert not threads[1].startswith("slipstream-bodies")


# Allowed ids


def test_allowed_ids_are_bounded_by_the_vocabulary(served: Guarded) -> None:
    size = bare_tokenizer().get_vocab_size()
    ids = [*range(size)]
    random.Random(5).shuffle(ids)
    allowed = served.post(prompt="x", max_tokens=3, allowed_token_ids=ids)
    assert allowed.json()["choices"][0]["text"] == expected("x", 3)
    message = refused(served.post(prompt="x", n=128, allowed_token_ids=[5] * 250_000))
    assert message == f"allowed_token_ids must have at most {size} ids, the size of the vocabulary, got 250000"
    assert "at most 524288 items, got" in refused(served.post(prompt="x", allowed_token_ids=[5] * 600_000))


def test_the_samples_of_a_prompt_are_sent_once() -> None:
    size = bare_tokenizer().get_vocab_size()
    made = Preprocessor(tokenizer(), vocab_size=size, max_model_len=100_000, capacity=100_000, eos_ids=(EOS,))
    options: dict[str, Any] = {"allowed_token_ids": [*range(200)], "prediction": "a" * 20_000, "max_tokens": 5}
    (one,) = made.requests([5] * 50_000, SamplingParams(**options), "r")
    many = made.requests([5] * 50_000, SamplingParams(**options, n=128, seed=3, prompt_logprobs=2), "r")
    encoded = msgspec.msgpack.encode(Commands.start(many))
    assert len(encoded) < 1.2 * len(msgspec.msgpack.encode(Commands.start([one])))
    received = list(msgspec.msgpack.decode(encoded, type=Commands).unpack())
    assert received == many
    assert len({each.sampling.seed for each in received}) == 128  # type: ignore[union-attr]
    assert len({id(each.prompt_token_ids) for each in received}) == 1  # type: ignore[union-attr]
    mixed = [*many[:3], one, *many[3:5]]
    assert list(Commands.start(mixed).unpack()) == mixed


# Uploads that break off


def test_an_upload_that_breaks_off_is_one_line_at_debug(served: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "slipstream")
    for path in POSTED:
        caplog.clear()
        head = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
        with socket.create_connection(("127.0.0.1", served.port)) as connection:
            connection.sendall(head % path.encode())
        wait_until(lambda: bool(caplog.records), what="a line about the upload")
        served.get("/health")
        assert [(record.levelname, record.exc_info) for record in caplog.records if record.name != "httpx"] == [
            ("DEBUG", None)
        ]
    assert served.get("/health").status_code == 200
