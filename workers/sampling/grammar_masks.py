"""Grammar masks: -inf for the logits of tokens that a sequence's grammar forbids.

Called by `workers.sampling.sampler.Sampler`, only for slots that have a grammar.
"""

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protos.config.engine import ModelConfig
from protos.grammars.fork import Vocabulary
from protos.grammars.host import GrammarHost
from protos.guidance import GrammarError
from workers.sampling.grammar_followers import MEMORY_BYTES, MODULE
from workers.sampling.grammar_slots import SlotGrammars
from workers.sampling.matcher import Bits
from workers.sampling.sample import Ints
from workers.slots import SlotTable
from workers.weights.hub import fetch_tokenizer

WORD_BITS = 8


class GrammarMasks:
    """Masks logits by the grammars of the sequences in the slots.

    Args:
        slots: owned by the worker; read only.
        grammars: compiles and follows the grammars.
    """

    def __init__(self, slots: SlotTable, grammars: SlotGrammars) -> None:
        self.grammars, self._slots = grammars, slots

    def apply(self, logits_NV: torch.Tensor, slots_N: Ints, index_N: Ints) -> torch.Tensor:
        """Return a copy of the logits, masked in the rows that have a grammar; arguments as for `Sampler.sample`."""
        rows_M = np.flatnonzero(self._slots.constrained[slots_N])
        bits_M = self.grammars.allowed(slots_N[rows_M].tolist(), index_N[rows_M].tolist())
        if len(rows_M) == len(slots_N):
            return masked(logits_NV, bits_M)
        at_M = torch.from_numpy(rows_M).to(logits_NV.device)
        return logits_NV.index_copy(0, at_M, masked(logits_NV[at_M], bits_M))


def masked(logits_NV: torch.Tensor, bits_N: Seq[Bits]) -> torch.Tensor:
    """Return a copy of float32 logits, -inf for ids whose bit is not set; NaN stays NaN."""
    allowed_NV = _unpacked(np.stack(bits_N), logits_NV.shape[1], logits_NV.device)
    return logits_NV + torch.where(allowed_NV, 0.0, -torch.inf)


def _unpacked(bits_NB: Bits, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return the bits as bool `[N, V]` on *device*; they are copied to the device packed."""
    if device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits_NB, axis=1, count=vocab_size, bitorder="little")).bool()
    packed_NB = torch.from_numpy(bits_NB).to(device)
    shifts = torch.arange(WORD_BITS, dtype=torch.uint8, device=device)
    unpacked_NB8 = packed_NB[:, :, None] >> shifts & 1
    return unpacked_NB8.flatten(1)[:, :vocab_size].bool()


def load_grammar_masks(config: ModelConfig, slots: SlotTable, vocab_size: int, eos_ids: Seq[int]) -> GrammarMasks:
    """Return the grammar masks of a target. The tokenizer's vocabulary is read in a process that starts here."""

    def load_vocabulary() -> Vocabulary:
        return Vocabulary(_tokenizer_json(config), vocab_size, tuple(eos_ids), MEMORY_BYTES)

    grammars = SlotGrammars(slots, vocab_size, eos_ids, GrammarHost(MODULE, load_vocabulary))
    if not config.skip_tokenizer_init and eos_ids:
        grammars.load()
    return GrammarMasks(slots, grammars)


def _tokenizer_json(config: ModelConfig) -> str:
    """Return the model's tokenizer in its one-file form."""
    if config.skip_tokenizer_init:
        raise GrammarError("structured output is text, but skip_tokenizer_init is set")
    text: str = _load_tokenizer(fetch_tokenizer(config)).backend_tokenizer.to_str()
    return text


def _load_tokenizer(folder: Path) -> Any:
    """Return the fast tokenizer in *folder*; older files are converted."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
