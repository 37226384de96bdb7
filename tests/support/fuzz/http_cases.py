"""Generated HTTP requests."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.fuzz.dice import Dice

NAMES = (*("demo",) * 12, "no such model", "")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
         "/tokenize", "/detokenize")  # fmt: skip
OTHER_PATHS = ("/", "/health", "/metrics", "/version", "/v1/models", "/v1/models/demo", "/openapi.json", "/v1", "/none",
               "//v1/completions", "/v1/completions/", "/v1/models/..%2f..%2fetc%2fpasswd", "/%00",
               "/v1/%ff")  # fmt: skip
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
KINDS = ("text/plain", "application/xml", "multipart/form-data", "application/json; charset=utf-16", "x" * 300)
HUGE = 33 * 2**20


@dataclass(frozen=True)
class HttpCase:
    """A request. `cut`: the connection is closed after that many bytes of the body; None: it is sent whole."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.headers} cut={self.cut} {self.body[:2000]!r} ({len(self.body)} bytes)"


def make(dice: Dice) -> HttpCase:
    """Return a request: three of five are valid but for single values."""
    chance = dice.random()
    if chance < 0.08:
        return HttpCase(dice.choice(METHODS), dice.choice((*PATHS, *OTHER_PATHS)))
    path = dice.choice(PATHS)
    fields = BODIES[path](dice)
    if chance < 0.35:
        for _ in range(dice.choice((1, 1, 1, 2, 5))):
            fields = dice.mutated(fields)
    return _posted(dice, path, json.dumps(fields).encode(), chance)


def _posted(dice: Dice, path: str, body: bytes, chance: float) -> HttpCase:
    headers = {"content-type": "application/json"}
    if dice.is_lucky(0.05):
        headers |= dice.choice(({"x-request-id": "x" * 500}, {"accept": "nothing"}, {"x-session-id": "é"},
                                {"content-encoding": "gzip"}, {"authorization": "Bearer " + "k" * 999}))  # fmt: skip
    if chance > 0.995:
        return HttpCase("POST", path, b'{"prompt": "' + b"a" * dice.choice((10**6, HUGE)) + b'"}', headers)
    if chance > 0.96:
        return HttpCase("POST", path, body, headers, cut=dice.randrange(len(body) + 1))
    if chance > 0.94:
        return HttpCase("POST", path, body, {"content-type": dice.choice(KINDS)})
    if chance > 0.90:
        at, bits = dice.randrange(len(body)), bytes([dice.randrange(256)])
        broken = (body[:at], body[:at] + bits + body[at + 1 :], body + body, b"[" * dice.randrange(20_000))
        return HttpCase("POST", path, dice.choice(broken), headers)
    return HttpCase("POST", path, body, headers)


def _sampling(dice: Dice) -> dict[str, Any]:
    """Return a few sampling options, all valid by themselves."""
    made: dict[str, Any] = {
        "temperature": dice.uniform(0, 2),
        "top_p": dice.uniform(0.05, 1),
        "top_k": dice.choice((-1, 0, 1, 20)),
        "min_p": dice.uniform(0, 0.5),
        "presence_penalty": dice.uniform(-2, 2),
        "frequency_penalty": dice.uniform(-2, 2),
        "repetition_penalty": dice.uniform(0.5, 2),
        "seed": dice.randrange(2**32),
        "stop": dice.choice(("a", ["b", "\n"], ["  "])),
        "stop_token_ids": [dice.randrange(300)],
        "logit_bias": {str(dice.randrange(300)): dice.uniform(-100, 100)},
        "allowed_token_ids": [dice.randrange(300) for _ in range(dice.randint(1, 20))],
        "bad_words": [dice.choice(("the", "a", "ab"))],
        "min_tokens": dice.randint(0, 3),
        "ignore_eos": True,
        "skip_special_tokens": dice.is_lucky(0.5),
        "truncate_prompt_tokens": dice.choice((-1, 1, 5)),
        "structured_outputs": dice.form(),
        "prediction": {"type": "content", "content": dice.text()},
        "speculative_config": dice.choice(({"enabled": False}, {"num_speculative_tokens": dice.randint(0, 9)})),
        "per_request_spec_decode_metrics": dice.choice(("none", "summary", "detailed")),
        "token_origins": dice.is_lucky(0.5),
        "cache_salt": dice.choice(("", "salt")),
        "timeout": dice.uniform(0.01, 20),
        "user": dice.text(),
        "stream": dice.is_lucky(0.6),
    }
    return {name: made[name] for name in dice.sample(list(made), k=dice.randint(0, 6))}


def _tokens(dice: Dice) -> list[int]:
    return [dice.randrange(280) for _ in range(dice.randint(1, 12))]


def _completion(dice: Dice) -> dict[str, Any]:
    prompt = dice.choice((dice.text(), dice.text(), [dice.text(), dice.text()], _tokens(dice)))
    extra: dict[str, Any] = {
        "n": dice.randint(1, 3),
        "logprobs": dice.randint(0, 5),
        "prompt_logprobs": 1,
        "echo": True,
    }
    more = {name: extra[name] for name in dice.sample(list(extra), k=dice.choice((0, 0, 1, 2)))}
    return {"model": dice.choice(NAMES), "prompt": prompt, "max_tokens": dice.randint(1, 8), **more, **_sampling(dice)}


def _turn(dice: Dice) -> dict[str, Any]:
    parts = [{"type": "text", "text": dice.text()}]
    return {"role": dice.choice(("user", "assistant", "system", "tool")), "content": dice.choice((dice.text(), parts))}


def _turns(dice: Dice) -> list[dict[str, Any]]:
    return [*(_turn(dice) for _ in range(dice.choice((0, 0, 1, 3)))), {"role": "user", "content": dice.text()}]


def _tool(dice: Dice) -> dict[str, Any]:
    return {"name": dice.choice(("paint", "wait", "f")), "description": dice.text(), "parameters": dice.schema()}


def _chat(dice: Dice) -> dict[str, Any]:
    fields = {"model": dice.choice(NAMES), "messages": _turns(dice), "max_tokens": dice.randint(1, 8)} | _sampling(dice)
    if dice.is_lucky(0.15):
        fields["tools"] = [{"type": "function", "function": _tool(dice)}]
        fields["tool_choice"] = dice.choice(("none", "required", "auto"))
    elif dice.is_lucky(0.15):
        schema = {"name": "x", "schema": dice.schema(), "strict": dice.is_lucky(0.5)}
        forms: list[Any] = [{"type": "json_object"}, {"type": "json_schema", "json_schema": schema}]
        fields["response_format"] = dice.choice(forms)
    return fields


def _response(dice: Dice) -> dict[str, Any]:
    asked: Any = dice.text() if dice.is_lucky(0.5) else _turns(dice)
    fields = {"model": dice.choice(NAMES), "input": asked, "max_output_tokens": dice.randint(1, 8)} | _sampling(dice)
    if dice.is_lucky(0.2):
        fields["text"] = {"format": {"type": "json_schema", "name": "x", "schema": dice.schema()}}
    if dice.is_lucky(0.2):
        fields["tools"] = [{"type": "function", **_tool(dice)}]
    return fields


def _message(dice: Dice) -> dict[str, Any]:
    fields = {"model": dice.choice(NAMES), "messages": _turns(dice), "max_tokens": dice.randint(1, 8)} | _sampling(dice)
    if dice.is_lucky(0.3):
        fields["system"] = dice.text()
    if dice.is_lucky(0.2):
        tool = _tool(dice)
        fields["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]}]
        fields["tool_choice"] = {"type": dice.choice(("any", "auto", "none", "tool")), "name": "f"}
    return fields


def _count(dice: Dice) -> dict[str, Any]:
    return {"model": dice.choice(NAMES), "messages": _turns(dice)}


def _tokenize(dice: Dice) -> dict[str, Any]:
    asked: dict[str, Any] = {"prompt": dice.text()} if dice.is_lucky(0.6) else {"messages": _turns(dice)}
    return {"model": dice.choice(NAMES), **asked, "add_special_tokens": dice.is_lucky(0.5)}


def _detokenize(dice: Dice) -> dict[str, Any]:
    return {"model": dice.choice(NAMES), "tokens": _tokens(dice)}


BODIES = dict(zip(PATHS, (_completion, _chat, _response, _message, _count, _tokenize, _detokenize), strict=True))
