"""The prompts of conversations that a model holds: what was said so far, as token ids."""

from collections.abc import Sequence
from itertools import chain, zip_longest

from cluster.bench.questions import Ids, Question
from protos.errors import ConfigError, InvalidRequestError
from runtime.text.preprocessor import Preprocessor
from runtime.text.tokenizer import Tokenizer

SEPARATOR = "\n"
"""Between what is said where there is no chat template."""
ANY_SIZE = 1 << 40
"""Limits of an engine that is not loaded yet. It checks its own again."""


GROWTH = 3
"""An answer tokenized again has at most so many times as many tokens: bytes that are no text become three."""


class QuestionPrompts:
    """Makes prompts, through the chat template or as plain text. No model is needed.

    Args:
        tokenizer: the target's; None if all questions are token ids.
        vocab_size: of the target; None if it is not known.
        uses_template: whether messages are rendered by the chat template, or joined by line breaks.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int | None, *, uses_template: bool) -> None:
        self._tokenizer, self._uses_template = tokenizer, uses_template
        size = vocab_size or ANY_SIZE
        self._preprocessor = Preprocessor(tokenizer, vocab_size=size, max_model_len=ANY_SIZE, capacity=ANY_SIZE)

    def ids(self, question: Question, answers: Sequence[str] = ()) -> Ids:
        """Return the prompt of the turn after *answers*, which are the model's to the turns before.

        Raises:
            ConfigError: names the question and why it cannot be a prompt.
        """
        try:
            return self._ids(question, answers)
        except InvalidRequestError as error:
            raise ConfigError(f"{question.place}: {error}") from None

    def _ids(self, question: Question, answers: Sequence[str]) -> Ids:
        turns = question.turns[: len(answers) + 1]
        texts = [text for text in turns if isinstance(text, str)]
        if len(texts) < len(turns):
            return self._preprocessor.encode(list(question.turns[0])).token_ids
        if question.is_chat and self._uses_template:
            pairs = zip_longest(_messages("user", texts), _messages("assistant", answers))
            said = [message for message in chain.from_iterable(pairs) if message is not None]
            return self._preprocessor.chat([*question.history, *said]).token_ids
        before = [message["content"] for message in question.history]
        spoken = [text for text in chain.from_iterable(zip_longest(texts, answers)) if text is not None]
        return self._preprocessor.encode(SEPARATOR.join([*before, *spoken])).token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        """Return the text of an answer, without special tokens."""
        return "" if self._tokenizer is None else self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def most_tokens(self, question: Question, max_tokens: int, *, growth: int = 1) -> int:
        """Return the length of the whole conversation if every answer has *max_tokens* tokens.

        Tokenized again, as part of the next prompt, an answer is taken to have *growth* times as many.
        """
        num_before = len(question.turns) - 1
        return len(self.ids(question, [""] * num_before)) + (growth * num_before + 1) * max_tokens


def _messages(role: str, texts: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for text in texts]
