"""Grammars with checks of their texts, and tiny models that share a byte tokenizer."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from protos.grammars.fork import Vocabulary
from protos.grammars.host import GrammarHost
from protos.guidance import vocabulary
from protos.messages import Grammar
from protos.structured import StructuredOutputsParams, grammar_of
from tests.support.models import synthetic_layers, tiny_models
from workers.sampling.grammar_followers import MEMORY_BYTES, MODULE

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LINE = r"[a-z]{2,8} = (-?[0-9]{1,3}|'[^'\\\n]{0,6}')"
WORDS = ("yes", "no", "no idea", 'niño\n"{}" | a')
SUMS = 'start: term ("+" term){0,3}\nterm: /[0-9]{1,2}/ | "(" start_ ")"\nstart_: /[a-c]/ ("*" start_)? '

AMBIGUOUS = "start: s\ns: s s s | s s | /[a-z]/ | "
"""Becomes slow after some dozens of tokens."""


@dataclass(frozen=True)
class Form:
    """A structured output and a check whether a text has that form."""

    asked: dict[str, Any]
    is_met: Callable[[str], bool]

    @property
    def grammar(self) -> Grammar:
        return grammar_of(StructuredOutputsParams(**self.asked))


def is_person(text: str) -> bool:
    jsonschema.validate(json.loads(text), PERSON)
    return True


def is_compact(text: str) -> bool:
    return is_person(text) and text.startswith('{"name":"') and "\n" not in text


def is_sum(text: str) -> bool:
    return bool(re.fullmatch(r"(\d{1,2}|\([a-c](\*[a-c])*\))(\+(\d{1,2}|\([a-c](\*[a-c])*\))){0,3}", text, re.A))


FORMS = {
    "json": Form({"json": PERSON}, is_person),
    "compact": Form({"json": PERSON, "disable_any_whitespace": True}, is_compact),
    "regex": Form({"regex": LINE}, lambda text: bool(re.fullmatch(LINE, text))),
    "choice": Form({"choice": WORDS}, lambda text: text in WORDS),
    "lark": Form({"grammar": SUMS}, is_sum),
}


CORPUS = [json.dumps({"name": "Anna Bo", "age": n, "tags": ["a", "bb", "ccc"]}) for n in range(120)] + [
    "name = 'value'",
    "yes no no idea",
    "12+(a*b)+3",
    "ni\u00f1o",
]
SPECIAL = ("<pad>", "<s>", "</s>")
EOS = 2
PADDED = 3
"""Rows of the models' heads that no token has."""


@cache
def tokenizer() -> Any:
    """Return a tokenizer of bytes, merged text that grammars cut through, and three special tokens; the last is EOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def vocab_size() -> int:
    """Return the models' vocabulary size: the tokenizer's ids and some padding."""
    return len(tokenizer().get_vocab()) + PADDED


@cache
def words(eos_ids: tuple[int, ...] = (EOS,)) -> Any:
    """Return the vocabulary for the grammar library."""
    return vocabulary(tokenizer().backend_tokenizer.to_str(), vocab_size(), eos_ids)


@cache
def follower_host() -> GrammarHost:
    """Return what starts processes that follow grammars of `tokenizer`."""
    return GrammarHost(MODULE, word_list)


def word_list() -> Vocabulary:
    """Return the vocabulary for processes that follow grammars."""
    return Vocabulary(tokenizer().backend_tokenizer.to_str(), vocab_size(), (EOS,), MEMORY_BYTES)


def tiny_models_in(folder: Path) -> dict[str, Path]:
    """Save a target, a perturbed copy of it, and an EAGLE-3 head; return their folders."""
    target = tiny_models.build("llama", folder / "target", vocab_size=vocab_size())
    draft = tiny_models.perturb(target, folder / "draft")
    for place in (target, draft):
        tokenizer().save_pretrained(place)
    return {"target": target, "draft": draft, "eagle3": synthetic_layers.eagle3(target).write(folder / "eagle3")}
