"""The interface of tokenizers, and loading them."""

from collections.abc import Sequence
from typing import Any, Protocol

from protos.config.engine import ModelConfig
from protos.errors import ModelError
from protos.hub import folder_of, unreachable


class Tokenizer(Protocol):
    """The part of `transformers.PreTrainedTokenizerFast` that is used here."""

    chat_template: str | None
    is_fast: bool
    backend_tokenizer: Any

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool = True) -> list[int]:
        """Return the ids of *text*. If *verbose*, a warning says when the model cannot take as many."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of *token_ids*."""
        ...

    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str]:
        """Return the vocabulary's strings of *ids*."""
        ...

    def get_vocab(self) -> dict[str, int]:
        """Return every token and its id."""
        ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render *conversation*. transformers runs templates in a sandbox."""
        ...


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """Load the tokenizer of *config*; None with `skip_tokenizer_init`. Does not import torch.

    Raises:
        ModelError: there is no such folder, or no tokenizer can be loaded without running the repository's code.
    """
    if config.skip_tokenizer_init:
        return None
    name = config.tokenizer or config.model
    folder = folder_of(name)
    unreached = unreachable() if folder is None else None
    options = {
        "revision": config.tokenizer_revision or (config.revision if config.tokenizer is None else None),
        "cache_dir": config.download_dir,
        "local_files_only": folder is not None or unreached is not None,
    }
    where = str(folder or name)
    try:
        return _from_one_file(where, options) or _from_parts(where, options)
    except Exception as error:
        if unreached is not None:
            raise ModelError(
                f"{name}: no tokenizer in the cache, and the Hub cannot be reached ({unreached})"
            ) from None
        reason = str(error).partition("\n")[0]
        raise ModelError(
            f"no tokenizer could be loaded from {name} ({reason}); pass tokenizer= a folder or Hub id with a "
            "tokenizer.json, or skip_tokenizer_init=True to use token ids only"
        ) from None


def _from_one_file(name: str, options: dict[str, Any]) -> Tokenizer | None:
    """Return the tokenizer of a tokenizer.json, None if there is no such file."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - takes a second to import

    try:
        tokenizer: Tokenizer = PreTrainedTokenizerFast.from_pretrained(name, **options)
    except (OSError, ValueError):
        return None
    return tokenizer


def _from_parts(name: str, options: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer converted from older files: vocab.json and merges.txt, or a sentencepiece model."""
    from transformers import AutoTokenizer  # noqa: PLC0415 - imports torch

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False, **options)
    if not tokenizer.is_fast:
        raise ValueError("the tokenizers library does not support it")
    return tokenizer
