"""Random values, valid and hostile, out of a seed."""

import random
from typing import Any

ODD_TEXTS = ("", " ", "\0", "\ud800", "😀" * 40, "<eos>", "%s%n{0}{{x}}", "a" * 3000, "\r\n", "[INST]", "\u202e", "-1")
ODD_NUMBERS = (0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf"))
WORDS = ("def", "add(a, b):", "return", "the cat", "once", "naïve", "if x > 0", "{", "}", '"', "1 + 1 =", "\n", "    ")
PARTS = ("a", "b+", "[a-z]", "(x|y)", "\\d{2}", ".*", "(", ")", "[", "{3", "{1,5}", "^", "$", "\\b", "|", "(?:z)", "é")
TYPES = ("object", "string", "integer", "number", "boolean", "null", "array", "what")


class Dice(random.Random):
    """Draws values. The same seed draws the same values."""

    def is_lucky(self, chance: float) -> bool:
        return self.random() < chance

    def text(self) -> str:
        if self.is_lucky(0.1):
            return self.choice(ODD_TEXTS)
        return " ".join(self.choices(WORDS, k=self.randint(1, 8)))

    def odd(self, depth: int = 0) -> Any:
        """Return a value of any type, as JSON has them, NaN included."""
        kind = self.randrange(8 if depth < 3 else 5)
        if kind < 2:
            return self.choice(ODD_NUMBERS)
        if kind < 4:
            return self.text()
        if kind == 4:
            return self.choice((None, True, False))
        if kind == 5:
            return [self.odd(depth + 1) for _ in range(self.randint(0, 4))]
        if kind == 6:
            return {self.choice(("a", "type", "name", "", "5")): self.odd(depth + 1) for _ in range(self.randint(0, 3))}
        return self.nested(self.choice((5, 50, 300)))

    def nested(self, depth: int) -> Any:
        made: Any = 1
        for _ in range(depth):
            made = [made] if self.is_lucky(0.5) else {"a": made}
        return made

    def mutated(self, value: Any) -> Any:
        """Return *value* with one thing in it changed, left out, or added."""
        if isinstance(value, dict) and value and self.is_lucky(0.9):
            made, name = dict(value), self.choice(list(value))
            act = self.randrange(4)
            if act == 0:
                del made[name]
            elif act == 1:
                made[self.choice(("unknown", "x" * 300, "n", "stop", "tools", "messages", "__class__"))] = self.odd()
            else:
                made[name] = self.mutated(made[name])
            return made
        if isinstance(value, list) and value and self.is_lucky(0.8):
            made_list, index = list(value), self.randrange(len(value))
            made_list[index] = self.mutated(made_list[index])
            return made_list
        return self.odd()

    # The format of an answer.

    def regex(self) -> str:
        return "".join(self.choices(PARTS, k=self.randint(1, 10)))

    def schema(self, depth: int = 0) -> Any:
        """Return a JSON schema, mostly a valid one."""
        kind = self.choice(TYPES[:7]) if self.is_lucky(0.9) else self.odd()
        made: dict[str, Any] = {"type": kind}
        if kind == "object" and depth < 4:
            names = self.sample(("a", "b", "c", "verdict"), k=self.randint(0, 3))
            made |= {"properties": {name: self.schema(depth + 1) for name in names}, "required": names[:1]}
        if kind == "array" and depth < 4:
            made |= {"items": self.schema(depth + 1), "maxItems": self.randint(0, 3)}
        if kind == "string" and self.is_lucky(0.3):
            made |= {"pattern": self.regex()} if self.is_lucky(0.5) else {"maxLength": self.randint(0, 9)}
        if self.is_lucky(0.1):
            made |= {self.choice(("anyOf", "allOf", "oneOf", "enum", "const", "$ref", "minimum")): self.odd()}
        return made

    def grammar(self) -> str:
        """Return a grammar in Lark's syntax, or something like one."""
        ends = ('"a"', '"b" end', "/[a-z]+/", "/[0-9]{1,3}/", "WORD", "end?", "(end)*")
        rules = [f"start: {self.choice(ends)} {self.choice(ends)}", f"end: {self.choice(ends[:4])}", "WORD: /[a-z]/"]
        made = "\n".join(self.sample(rules, k=self.randint(1, 3)))
        if self.is_lucky(0.3):
            at = self.randrange(len(made))
            made = made[:at] + self.choice(("(", ":", "|", "\0", '"', "start", "")) + made[at + 1 :]
        return made

    def form(self) -> dict[str, Any]:
        """Return `structured_outputs`."""
        made: list[dict[str, Any]] = [
            {"regex": self.regex()},
            {"choice": [self.text() for _ in range(self.randint(0, 3))]},
            {"json": self.schema()},
            {"json_object": True},
            {"grammar": self.grammar()},
        ]
        return self.choice(made)
