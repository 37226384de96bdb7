"""A tiny target, a perturbed copy of it as draft, and a tokenizer they share."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.models import tiny_models

SPECIAL = ("<pad>", "<s>", "</s>")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


def build(folder: Path, family: str = "opt", noise: float = 0.05) -> tuple[Path, Path]:
    """Save both into *folder*; return their folders. With less *noise* the draft is right more often."""
    tokenizer = _byte_tokenizer()
    size = tokenizer.backend_tokenizer.get_vocab_size()
    target = tiny_models.build(family, folder / "target", vocab_size=size)
    draft = tiny_models.perturb(target, folder / "draft", noise=noise)
    for place in (target, draft):
        tokenizer.save_pretrained(place)
    return target, draft


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte: every text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = TEMPLATE
    return fast
