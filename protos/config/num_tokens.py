"""The number of draft tokens of a configuration: fixed, and by batch size."""

import logging
from typing import Any

from protos.config.default_shape import AUTHORS
from protos.config.engine import MAX_SPECULATIVE_TOKENS, SpeculativeConfig
from protos.config.method import Described, Methods, names_of
from protos.config.tree import STEPS, TOKENS, TOPK, TREE
from protos.errors import ConfigError
from protos.validation import shown

logger = logging.getLogger("slipstream")

Keys = dict[str, Any]
DEFAULT_TOKENS = 5
REST_TOKENS = 16
SHAPE_KEYS = frozenset({TOKENS, TOPK, STEPS, TREE, "num_speculative_tokens_per_batch_size"})
LOOKAHEAD = ("lookahead_window", "lookahead_ngram", "lookahead_guesses")


def num_tokens(method: Methods, keys: Keys, found: Described) -> object:
    """Return K: as given, else the largest in the table by batch size, else the checkpoint's, else the default."""
    table = keys.get("num_speculative_tokens_per_batch_size")
    if "num_speculative_tokens" not in keys and table:
        return max(1, *(k for _, _, k in _table(table, MAX_SPECULATIVE_TOKENS)))
    names = names_of(method)
    if TOKENS not in keys and found.num_tokens and found.method in names:
        logger.info("num_speculative_tokens is %d: %s of the checkpoint", found.num_tokens, found.source)
        return min(found.num_tokens, MAX_SPECULATIVE_TOKENS)
    return keys.get(TOKENS, _default_tokens(method, keys))


def has_default_shape(method: Methods, keys: Keys, found: Described) -> bool:
    """Whether *method* has default shapes by device, and neither *keys* nor the checkpoint state a shape."""
    if not isinstance(method, str) or method not in AUTHORS or keys["rejection_sample_method"] == "synthetic":
        return False
    return SHAPE_KEYS.isdisjoint(keys) and not (found.num_tokens and found.method == method)


def _default_tokens(method: Methods, keys: Keys) -> object:
    """Return the default K of *method*: the depth limit of `suffix`, window plus n-grams of `lookahead`."""
    if method == "suffix":
        return _capped(keys.get("suffix_decoding_max_tree_depth", SpeculativeConfig.suffix_decoding_max_tree_depth))
    if method == "lookahead":
        window, size, ngrams = (keys.get(name, getattr(SpeculativeConfig, name)) for name in LOOKAHEAD)
        if all(type(number) is int for number in (window, size, ngrams)):
            return _capped((window + ngrams) * (size - 1))
    return REST_TOKENS if method == "rest" else DEFAULT_TOKENS


def _capped(tokens: object) -> object:
    return max(1, min(tokens, MAX_SPECULATIVE_TOKENS)) if type(tokens) is int else tokens


def by_batch_size(keys: Keys, most: object) -> Keys:
    """Return the checked table of K by batch size, if *keys* have one; each K is at most *most*."""
    value = keys.get("num_speculative_tokens_per_batch_size")
    if value is None:
        return {}
    if "disable_by_batch_size" in keys:
        raise ConfigError(
            "speculative_config: disable_by_batch_size and num_speculative_tokens_per_batch_size both "
            "reduce speculation for large batches; give one"
        )
    limit = most if type(most) is int else MAX_SPECULATIVE_TOKENS
    return {"num_speculative_tokens_per_batch_size": _table(value, limit)}


def _table(value: object, limit: int) -> tuple[tuple[int, int, int], ...]:
    """Check rows `[first batch size, last, K]`: ascending from 1 without overlap. In gaps, the K before applies."""
    name = "speculative_config: num_speculative_tokens_per_batch_size"
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{name} must be a list of [start, end, K], got {shown(value)}")
    rows: list[tuple[int, int, int]] = []
    for row in value:
        if not isinstance(row, list | tuple) or len(row) != 3 or not all(type(number) is int for number in row):
            raise ConfigError(f"{name}: each row must be three integers [start, end, K], got {shown(row)}")
        start, end, k = row
        if start > end or (start != 1 if not rows else start <= rows[-1][1]):
            raise ConfigError(f"{name}: rows must start at batch size 1 and ascend without overlap, got {shown(row)}")
        if not 0 <= k <= limit:
            raise ConfigError(f"{name}: K must be from 0 to {limit}, got {k} in {shown(row)}")
        rows.append((start, end, k))
    return tuple(rows)
