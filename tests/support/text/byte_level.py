"""Byte-level tokenizers, trained in a moment."""

from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


def train_byte_level(texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str | AddedToken]) -> Tokenizer:
    """Return a byte-level BPE tokenizer; `transformers` is not needed for it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(special_tokens),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
