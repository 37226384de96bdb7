"""Detects the method of a checkpoint: from its config, else from its tensors, else from its name."""

import re
from collections.abc import Collection, Mapping

from proposers.formats import dflash, mtp, speculators
from proposers.formats.shared.layout import numbered, refuse
from proposers.formats.shared.masks import has_mask
from proposers.formats.shared.peek import Peek
from proposers.formats.shared.values import Config, flag, integer
from protos.config.method import Described

WHOLE = "draft_model"


def describe(model: str, revision: str | None = None, *, cache: str | None = None) -> Described:
    """Describe the checkpoint of a Hub id or a folder; `cache` is where downloads are kept.

    For Hub ids, `config.json` is fetched, and headers of weights only if that is not enough. A checkpoint that cannot
    be reached is detected by its name, or unknown.

    Raises:
        ModelError: it is a kind of draft that is not supported, or its config is contradictory.
    """
    peek = Peek(model, revision, cache)
    method = _by_config(peek.config) or _by_tensors(peek) or _by_name(model)
    if method == "mtp" and _lacks_heads(peek):
        method = WHOLE  # some tools remove the heads but keep the config
    if method is None:
        return Described()
    count, source = _tokens(method, peek)
    block_size = dflash.block_size_of(peek.config) if method == "dflash" and dflash.tokens_of(peek.config) else 0
    is_whole = method == "mtp" and not speculators.is_speculators(peek.config) and mtp.is_whole(peek.config)
    return Described(method, count or None, source, speculators.verifier_of(peek.config), block_size, is_whole)


def _lacks_heads(peek: Peek) -> bool:
    if not peek.is_local or not peek.names:
        return False
    heads = mtp.prefixes(peek.config)
    return not any(name.startswith(heads) for name in peek.names)


def _by_config(config: Config) -> str | None:
    if speculators.is_speculators(config):
        return speculators.method_of(config)
    kinds = [str(kind).lower() for kind in (config.get("model_type"), *_architectures(config))]
    for unsupported, reason in UNSUPPORTED.items():
        if any(unsupported in kind for kind in kinds):
            refuse(unsupported, reason)
    for method, marks, keys in CONFIG_MARKS:
        if any(mark in kind for mark in marks for kind in kinds) or any(config.get(key) for key in keys):
            return method
    if any("eagle3" in kind for kind in kinds) or any(config.get(key) for key in ("draft_vocab_size", "eagle_config")):
        return "p_eagle" if has_mask(config) or flag("draft", config, "parallel_drafting", default=False) else "eagle3"
    if any("eagle" in kind for kind in kinds):
        return "eagle"
    if any(kind.endswith("_mtp") for kind in kinds) or mtp.num_heads(config):
        return "mtp"
    return "pard" if has_mask(config) else None


UNSUPPORTED = dict.fromkeys(("dspark", "dflash2"), "this kind of draft is not supported") | dict.fromkeys(
    ("gemma4_assistant", "gemma4_unified_assistant"),
    "it drafts from the target's K and V, which is not supported; a small model of the family can draft instead",
)
CONFIG_MARKS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("medusa", ("medusa",), ("medusa_num_heads",)),
    ("hydra", ("hydra",), ("hydra_num_heads",)),
    ("mlp_speculator", ("mlp_speculator", "mlpspeculator"), ()),
    ("recurrent", ("recurrent_drafting", "recurrentdrafting", "redrafter"), ("num_draft_layers",)),
    ("dflash", ("dflash",), ("dflash_config",)),
)
"""Methods, the words in the model type or architectures that identify them, and the config keys that do."""


def _architectures(config: Config) -> Collection[object]:
    found = config.get("architectures")
    return found if isinstance(found, list) else ()


def _by_tensors(peek: Peek) -> str | None:
    """Detect the method by the names of tensors, if the config is that of a plain model or does not name one."""
    is_small = integer("draft", peek.config, "num_hidden_layers", "n_layer", default=0) <= 1
    is_plain = bool(peek.config.get("architectures")) and not is_small and _by_name(peek.model) is None
    if is_plain and not peek.is_local:
        return WHOLE
    names = {name.removeprefix("model.") for name in peek.names}
    return next(
        (method for method, there, absent in TENSOR_PATTERNS if _matches(names, there) and not _matches(names, absent)),
        None,
    )


TENSOR_PATTERNS: tuple[tuple[str, str, str], ...] = (
    ("hydra", r"(hydra_heads?\.)?hydra_mlp\.", "$^"),
    ("medusa", r"(medusa_heads?\.)?(\d+\.\d+\.linear\.weight|blocks\.\d+\.layers\.)", "$^"),
    ("mlp_speculator", r"speculator\.(emb|proj)\.0\.", "$^"),
    ("recurrent", r"(drafter\.)?(rnn_[uw]\.|input_proj\.)|(drafter\.)?lm_head\.0\.linear\.", r"layers\."),
    ("p_eagle", "mask_hidden$", "$^"),
    ("dflash", r"hidden_norm\.weight$", r"(midlayer|layers\.0)\.hidden_norm\.weight$"),
    ("eagle3", r"(midlayer|layers\.0)\.hidden_norm\.weight$|d2t$", "$^"),
    ("eagle", r"fc\.weight$", r"norm\.weight$"),
    ("mtp", r"mtp\.fc\.|mtp_layers\.|layers\.\d+\.eh_proj\.", "$^"),
    (WHOLE, r"((decoder|transformer|gpt_neox)\.)?(embed_tokens|wte|embed_in)\.", r"fc\.weight$"),
)
"""Methods, in the order tried: a pattern that some name must match, and one that none may match."""


def _matches(names: Collection[str], pattern: str) -> bool:
    matching = re.compile(pattern)
    return any(matching.match(name) for name in names)


MARKS = {
    "eagle3": "eagle3",
    "eagle-3": "eagle3",
    "eagle": "eagle",
    "medusa": "medusa",
    "hydra": "hydra",
    "dflash": "dflash",
    "redrafter": "recurrent",
    "pard-": "pard",
}
ACCELERATORS = re.compile(r"(ibm-ai-platform|ibm-fms|ibm-granite)/.*-accelerator$")


def _by_name(model: str) -> str | None:
    """Detect the method by the last part of a path or a Hub id."""
    name = model.rstrip("/").rpartition("/")[2].lower()
    if ACCELERATORS.match(model) or "mlp_speculator" in name or "mlp-speculator" in name:
        return "mlp_speculator"
    return next((method for mark, method in MARKS.items() if mark in name), None)


def _tokens(method: str, peek: Peek) -> tuple[int, str]:
    """Return the number of tokens that a checkpoint drafts, and where it is stated; 0 if it is not."""
    config = peek.config
    if speculators.is_speculators(config) and (count := speculators.tokens_of(config)):
        return count, "speculative_tokens"
    if method == "dflash":
        return dflash.tokens_of(config), "block_size"
    if method == "mtp":
        return mtp.num_heads(config), "the number of heads"
    keys, what = COUNTED.get(method, ((), ""))
    count = integer(method, config, *keys, default=0) if keys else 0
    if method == "medusa" and peek.is_local:
        count = max(count, numbered(peek.names, r"(?:medusa_heads?\.)?(?:blocks\.)?(\d+)\."))
    return count, what


COUNTED: Mapping[str, tuple[tuple[str, ...], str]] = {
    "mlp_speculator": (("n_predict",), "n_predict"),
    "medusa": (("medusa_num_heads", "num_heads"), "the number of heads"),
    "hydra": (("hydra_num_heads",), "the number of heads"),
}
