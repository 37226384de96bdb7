"""Questions of `slipstream bench compare`: Spec-Bench's `question.jsonl`, ShareGPT, or JSON lines of prompts."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cluster.files import LINES, LIST, read_rows
from protos.errors import ConfigError
from protos.validation import shown

logger = logging.getLogger(__name__)

MT_BENCH = frozenset({
    "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
})  # fmt: skip
"""The categories of MT-Bench, which Spec-Bench's table has as one: `MT_BENCH_NAME`."""
MT_BENCH_NAME = "mt_bench"
USERS = frozenset({"human", "user"})
SYSTEM = "system"
FIELDS = ("turns", "conversations", "messages", "prompt_token_ids", "prompt")
SHAREGPT_FIELDS = "conversations", "from", "value"
MESSAGE_FIELDS = "messages", "role", "content"
"""A field that is a list, and those of its items that hold who says what."""

Ids = tuple[int, ...]
Message = Mapping[str, str]


@dataclass(frozen=True)
class Question:
    """A conversation to be held with a model.

    Attributes:
        place: file and line, for messages.
        category: the column of the table.
        turns: what the user says, turn by turn; or one turn of token ids.
        history: messages before the first turn, such as a system prompt.
        is_chat: whether turns are messages, not text to be continued.
    """

    place: str
    category: str
    turns: tuple[str, ...] | tuple[Ids, ...]
    history: tuple[Message, ...] = ()
    is_chat: bool = True


def read_questions(path: Path, limit: int, max_turns: int) -> list[Question]:
    """Return up to *limit* questions of a file, the first of each category in turn, of up to *max_turns* turns each.

    ShareGPT conversations in which no user speaks are left out with a warning.

    Raises:
        ConfigError: names the line and what is wrong with it, or the file has no questions.
    """
    if path.suffix not in (LIST, LINES):
        raise ConfigError(f"dataset must be a .jsonl file, or a .json file (ShareGPT), got {path}")
    rows = [_question(item, place, path.stem) for place, item in read_rows(path)]
    found = [row for row in rows if row.turns]
    if len(found) < len(rows):
        logger.warning("%s: %d conversations have no turn of a user and are left out", path, len(rows) - len(found))
    if not found:
        raise ConfigError(f"{path} has no questions")
    return [_shortened(question, max_turns) for question in _in_turns(_grouped(found))[:limit]]


def _question(item: Any, place: str, default_category: str) -> Question:
    """Return the question of one line or item, which has no turns if it is a conversation without a user."""
    item, field = asked(item, place, FIELDS)
    category = item.get("category")
    if category is None and field == "turns":
        raise ConfigError(f"{place} has no category")
    if category is not None and (not isinstance(category, str) or not category.strip()):
        raise ConfigError(f"{place}: category must be text, got {shown(category)}")
    content = item[field]
    bare = Question(place, default_category if category is None else category.strip(), ())
    match field:
        case "turns":
            return replace(bare, turns=_texts(content, place))
        case "conversations":
            return _of_sharegpt(bare, content)
        case "messages":
            return _of_messages(bare, content)
    return replace(bare, turns=(_prompt(content, place, field),), is_chat=False)


def _texts(turns: Any, place: str) -> tuple[str, ...]:
    if not isinstance(turns, list) or not turns:
        raise ConfigError(f"{place}: turns must be a list of at least one text, got {shown(turns)}")
    return tuple(_text(turn, f"{place}: turn {number}") for number, turn in enumerate(turns, 1))


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{place} must be text, got {shown(value)}")
    return value


def _prompt(value: Any, place: str, field: str) -> Any:
    """Return a prompt: text, or a tuple of token ids."""
    if field == "prompt":
        return _text(value, f"{place}: prompt")
    if not isinstance(value, list) or not value or not all(type(token) is int and token >= 0 for token in value):
        raise ConfigError(f"{place}: prompt_token_ids must be a list of token ids, got {shown(value)}")
    return tuple(value)


def _of_sharegpt(bare: Question, turns: Any) -> Question:
    """Return the user's turns of a ShareGPT conversation; its recorded answers are not used."""
    said = said_by(turns, bare.place, *SHAREGPT_FIELDS)
    history = tuple({"role": SYSTEM, "content": text} for who, text in said[:1] if who == SYSTEM)
    return replace(bare, turns=tuple(text for who, text in said if who in USERS and text.strip()), history=history)


def _of_messages(bare: Question, messages: Any) -> Question:
    """Return the last message, which must be the user's, after those before it."""
    said = said_by(messages, bare.place, *MESSAGE_FIELDS)
    if not said or said[-1][0] != "user":
        raise ConfigError(f"{bare.place}: messages must end with one of role 'user'")
    history = tuple({"role": role, "content": text} for role, text in said[:-1])
    return replace(bare, turns=(_text(said[-1][1], f"{bare.place}: the last message"),), history=history)


def asked(item: Any, place: str, fields: Sequence[str]) -> tuple[dict[str, Any], str]:
    """Return a line or item as an object, and which of *fields* holds what is asked: the first that is not empty.

    Raises:
        ConfigError: it is neither text nor an object, or has none of *fields*.
    """
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, dict):
        raise ConfigError(f"{place} must be text or a JSON object, got {shown(item)}")
    given = [name for name in fields if item.get(name) is not None]
    if not given:
        raise ConfigError(
            f"{place} has none of the fields {', '.join(map(repr, fields))}, but {', '.join(sorted(item)) or 'none'}"
        )
    return item, next((name for name in given if item[name]), given[0])


def said_by(items: Any, place: str, field: str, who: str, what: str) -> list[tuple[str, str]]:
    """Return who said what. Raises `ConfigError` unless each item has both, as text."""
    if not isinstance(items, list):
        raise ConfigError(f"{place}: {field} must be a list, got {shown(items)}")
    for item in items:
        if not isinstance(item, dict) or not isinstance(item.get(who), str) or not isinstance(item.get(what), str):
            raise ConfigError(f"{place}: each of {field} must have the texts {who!r} and {what!r}, got {shown(item)}")
    return [(item[who], item[what]) for item in items]


def _grouped(questions: Sequence[Question]) -> Sequence[Question]:
    """Make the categories of MT-Bench one, if all of them are there."""
    if not {question.category for question in questions} >= MT_BENCH:
        return questions
    return [
        replace(question, category=MT_BENCH_NAME) if question.category in MT_BENCH else question
        for question in questions
    ]


def _in_turns(questions: Sequence[Question]) -> list[Question]:
    """Return the first question of each category, then the second of each, and so on."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    return [question for row in zip_longest(*by_category.values()) for question in row if question is not None]


def _shortened(question: Question, max_turns: int) -> Question:
    return replace(question, turns=question.turns[:max_turns])
