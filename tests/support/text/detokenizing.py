"""Tokenizers of two kinds, and the text of their tokens as it streams."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models

from protos.sampling import SamplingParams
from runtime.text.detokenizer import Detokenizer, DetokenizerFactory
from tests.support.distributed.fake_worker import make_request
from tests.support.text.byte_level import train_byte_level

CORPUS = [
    "def naïve(x): return x  # déjà vu",
    "import os\n\nclass Zebra:\n    pass\n",
    "日本語のテキスト、例えば「東京」。",
    "emoji 😀😃👩‍👩‍👧 and flags 🇩🇪",
    "Привет, мир! ¿Qué tal? €100",
]


def build_byte_level() -> Tokenizer:
    tokenizer = train_byte_level(CORPUS * 4, 400, ["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("日本 tool"), AddedToken("é!")])
    return tokenizer


def build_metaspace() -> Tokenizer:
    """Llama's kind: words begin with a bar, unknown characters fall back to bytes, the first space is stripped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "He", "llo", "!", "▁a", "b"]
    tokenizer = Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL = build_byte_level()
METASPACE = build_metaspace()


def make(tokenizer: Tokenizer, prompt: Sequence[int] = (0,), **params: object) -> Detokenizer:
    made = DetokenizerFactory(tokenizer)(make_request("r", prompt, params=SamplingParams(**params)))
    assert made is not None
    return made


def stream(text: Detokenizer, ids: Sequence[int]) -> tuple[list[str], str | None]:
    """Feed ids one by one; return the text shown after each, then the rest, and the stop string met."""
    shown = []
    for token_id in ids:
        stop = text.push(token_id)
        if stop is not None:
            return [*shown, text.finish()], stop
        shown.append(text.take())
    return [*shown, text.finish()], None


def letters(text: str) -> list[int]:
    """One token a byte."""
    return [BYTE_LEVEL.token_to_id(c) for c in "".join(p for p, _ in BYTE_LEVEL.pre_tokenizer.pre_tokenize_str(text))]
