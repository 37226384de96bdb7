"""The tokenizer: what is used of it, how it is loaded, and what counts as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from protos.config.engine import ModelConfig
from protos.errors import InvalidRequestError, ModelError


class Tokenizer(Protocol):
    """What is used of `transformers.PreTrainedTokenizerFast`."""

    chat_template: str | None
    is_fast: bool
    backend_tokenizer: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of *text*."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of *token_ids*."""
        ...

    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str]:
        """Return *ids* as the vocabulary spells them."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return every token and its id."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render *conversation*; sandboxed by transformers."""
        ...


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """Load the tokenizer that *config* names; None with `skip_tokenizer_init`. Does not load torch.

    Raises:
        ModelError: there is none that can be loaded without running its repository's code.
    """
    if config.skip_tokenizer_init:
        return None
    name = config.tokenizer or config.model
    revision = config.tokenizer_revision or (config.revision if config.tokenizer is None else None)
    options = {"revision": revision, "cache_dir": config.download_dir, "local_files_only": Path(name).is_dir()}
    try:
        return _from_one_file(name, options) or _from_parts(name, options)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"no tokenizer could be loaded from {name} ({reason}); pass tokenizer= a folder or Hub id with a "
            "tokenizer.json, or skip_tokenizer_init=True to use token ids only"
        ) from None


def _from_one_file(name: str, options: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a tokenizer.json, None where there is none."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes a second to import

    try:
        tokenizer: Tokenizer = PreTrainedTokenizerFast.from_pretrained(name, **options)
    except (OSError, ValueError):
        return None
    return tokenizer


def _from_parts(name: str, options: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that older files (vocab.json and merges.txt, a sentencepiece model) are converted to."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - loads torch, so only where it must

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    if not tokenizer.is_fast:
        raise ValueError("it has no form that the tokenizers library can run")
    return tokenizer


def check_text(text: str, param: str = "prompt") -> None:
    """Raise `InvalidRequestError` for text that is empty or cannot be encoded."""
    if not text:
        raise InvalidRequestError(f"{param} must not be empty", param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} has a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}; it is not text",
            param,
        ) from None
