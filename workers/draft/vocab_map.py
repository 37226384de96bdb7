"""Drafts with another vocabulary than the target's: ids are translated by their text.

Known tokens that the draft's vocabulary lacks become its unknown token. Only tokens of both vocabularies are drafted
(token-level intersection, Timor et al. 2025, arXiv 2502.05202). Sampling and acceptance are as for any other draft.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from protos.byte_level import token_bytes
from protos.errors import ModelError
from workers.attention.batch import Batch, Ints
from workers.model.draft_forward import DraftForward
from workers.model.loaded import LoadedModel
from workers.model.runner import ModelRunner

Texts = Mapping[tuple[str, bytes], int]
"""Id of each token by kind ("special" or "text") and its bytes."""


@dataclass(frozen=True)
class VocabMap:
    """Maps ids between the vocabularies of target and draft.

    Attributes:
        to_draft_V: int64, the draft's id for each id of the target; its unknown token if it has none.
        target_S, draft_S: int64, ids of the target and of the draft that have the same text.
    """

    to_draft_V: Ints
    target_S: torch.Tensor
    draft_S: torch.Tensor

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""
        return len(self.to_draft_V)

    @classmethod
    def of_tokenizers(cls, target: Path, draft: Path, vocab_size: int, draft_size: int) -> "VocabMap":
        """Return the map of the tokenizers in two folders, for models of *vocab_size* and *draft_size* ids.

        Ids beyond the models' vocabularies, which tokenizers may have, are ignored.

        Raises:
            ModelError: a folder has no tokenizer.json, or no text is in both.
        """
        (ours, _), (theirs, unknown) = _read(target), _read(draft)
        both = ((ours[text], theirs[text]) for text in ours.keys() & theirs.keys())
        shared = sorted((our, their) for our, their in both if our < vocab_size and their < draft_size)
        if not shared:
            raise ModelError(f"the tokenizers in {target} and {draft} share no token: take another draft")
        to_draft_V = np.full(vocab_size, unknown if unknown < draft_size else 0, np.int64)
        to_draft_V[[our for our, _ in shared]] = [their for _, their in shared]
        target_S, draft_S = torch.tensor(shared).T
        return cls(to_draft_V, target_S, draft_S)


class TranslatedForward:
    """Runs a draft over ids of the target's vocabulary. See `DraftForward`."""

    def __init__(self, forward: ModelRunner, loaded: LoadedModel, vocab_map: VocabMap) -> None:
        self._forward, self._vocab_map = forward, vocab_map
        self.loaded = replace(loaded, vocab_size=vocab_map.vocab_size)
        self.module, self.num_blocks = forward.module, forward.num_blocks
        self._target_S, self._draft_S = (ids.to(loaded.device) for ids in (vocab_map.target_S, vocab_map.draft_S))

    def forward(self, batch: Batch, wanted_N: Ints, features_TX: torch.Tensor | None = None) -> torch.Tensor:
        """See `DraftForward`; logits of the target's ids, `[N, V]`."""
        tokens_T = self._vocab_map.to_draft_V[batch.tokens_T]
        logits_ND = self._forward.forward(replace(batch, tokens_T=tokens_T), wanted_N)
        logits_NV = logits_ND.new_full((len(logits_ND), self._vocab_map.vocab_size), -torch.inf)
        return logits_NV.index_copy_(1, self._target_S, logits_ND.index_select(1, self._draft_S))

    def resumes_at(self, slots_R: Ints, generations_R: Ints, held_R: Ints) -> Ints:
        """See `DraftForward`."""
        return self._forward.resumes_at(slots_R, generations_R, held_R)

    def key(self) -> str | None:
        """See `workers.compiled.warming.Compilable`."""
        return self._forward.key()

    def compile_into(self, folder: Path, trial: Callable[[], None]) -> None:
        """See `workers.compiled.warming.Compilable`."""
        self._forward.compile_into(folder, trial)

    def load_compiled(self, folder: Path) -> None:
        """See `workers.compiled.warming.Compilable`."""
        self._forward.load_compiled(folder)

    def measure(self, max_tokens: int) -> Iterator[tuple[int, float]]:
        """See `DraftForward`."""
        return self._forward.measure(max_tokens)


def translate(forward: ModelRunner, loaded: LoadedModel, vocab_map: VocabMap | None) -> DraftForward:
    """Return *forward*, over the target's ids if there is a map."""
    return forward if vocab_map is None else TranslatedForward(forward, loaded, vocab_map)


def _read(folder: Path) -> tuple[Texts, int]:
    """Return the tokens of a folder's tokenizer, and its unknown token (0 if it has none)."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{folder} has no tokenizer.json, which use_heterogeneous_vocab needs of target and draft")
    tokenizer = Tokenizer.from_file(str(file))
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    described: dict[str, Any] = json.loads(tokenizer.to_str())
    spelt = token_bytes if "ByteLevel" in json.dumps(described.get("decoder")) else _sentencepiece
    texts: dict[tuple[str, bytes], int] = {}
    for token, index in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        key = ("special", token.encode()) if token in special else ("text", spelt(token))
        texts.setdefault(key, index)
    unknown = tokenizer.token_to_id(str(described["model"].get("unk_token")))
    return texts, unknown or 0


def _sentencepiece(token: str) -> bytes:
    """Return the bytes of a token of a sentencepiece-like tokenizer."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
