"""The vocabulary that grammars are followed in: read from the model's tokenizer, in a thread while the target warms up.

Read when the first grammar comes, a large one would take longer than a round may, and a Hub be asked while serving.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from protos.config.engine import ModelConfig
from protos.guidance import GrammarError, vocabulary
from workers.model.loaded import LoadedModel
from workers.sampling.grammar_sampler import GrammarSampler
from workers.sampling.grammar_slots import Grammars
from workers.sampling.sampler import Sampler
from workers.weights.hub import fetch_tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer


def with_grammars(sampler: Sampler, config: ModelConfig, target: LoadedModel) -> GrammarSampler:
    """Return the sampler of a target that *config* describes. The vocabulary is read beside whatever comes next."""

    def words() -> "LLTokenizer":
        return vocabulary(_tokenizer_json(config), target.vocab_size, target.eos_ids)

    grammars = Grammars(sampler.slots, sampler.vocab_size, target.eos_ids, words)
    if not config.skip_tokenizer_init and target.eos_ids:
        grammars.load()
    return GrammarSampler(sampler, grammars)


def _tokenizer_json(config: ModelConfig) -> str:
    """Return the model's tokenizer in its one-file form."""
    if config.skip_tokenizer_init:
        raise GrammarError("structured output is text, but skip_tokenizer_init is set")
    text: str = _load(fetch_tokenizer(config)).backend_tokenizer.to_str()
    return text


def _load(folder: Path) -> Any:
    """Return the fast tokenizer in *folder*; older files are converted."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: PLC0415

    if (folder / "tokenizer.json").is_file():
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
