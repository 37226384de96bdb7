"""The keys that shape a draft: static trees as in Medusa and vLLM, widths and depths as in SGLang."""

import ast
from collections.abc import Collection, Mapping
from typing import Any

from protos.config.engine import GROWN, MAX_SPECULATIVE_TOKENS
from protos.config.method import Methods, is_import_path, names_of
from protos.errors import ConfigError
from protos.validation import shown, warn_once

Keys = dict[str, Any]
Path = tuple[int, ...]

TREE, TOPK, STEPS, TOKENS = "speculative_token_tree", "eagle_topk", "num_steps", "num_speculative_tokens"
SHAPE = "draft_shape"
STATIC = frozenset({"medusa", "hydra", "mlp_speculator", "recurrent"})
"""Methods that draft static trees."""
BRANCHING = GROWN | {"recurrent"}
"""Methods that take a width: the children of a node, or the beams of a beam search."""
DEFAULT_STEPS = 5


def shaped(method: Methods, keys: Mapping[str, Any]) -> Keys:
    """Return *keys* with their tree checked and converted for *method*.

    A tree without branches becomes a number of tokens. For methods with dynamic trees, a given tree becomes its width,
    depth and size. `num_speculative_tokens` defaults to the size of the shape.

    Raises:
        ConfigError: the tree is malformed, or the method cannot draft it.
    """
    shape = dict(keys)
    names = set(names_of(method))
    may_branch = not names.isdisjoint(BRANCHING) or any(map(is_import_path, names))
    if TREE in shape:
        _set_tree(shape, paths(shape.pop(TREE)), names)
    width, steps = (_number(shape, key) for key in (TOPK, STEPS))
    if width == 1:
        shape.setdefault(SHAPE, "chain")
    if width is not None and width > 1 and not may_branch:
        raise ConfigError(
            f"speculative_config: {TOPK} must be 1 for method {shown(method)}, got {width}: "
            f"it drafts no tree; {', '.join(sorted(BRANCHING))} do"
        )
    if width in (None, 1) and steps is not None and not may_branch:
        del shape[STEPS]
    if steps is not None or (width or 1) > 1:
        shape.setdefault(TOKENS, min(MAX_SPECULATIVE_TOKENS, (width or 1) * (steps or DEFAULT_STEPS)))
    return shape


def paths(value: object) -> tuple[Path, ...]:
    """Return the nodes of a tree, each as its path of ranks from the root, shorter ones first.

    Args:
        value: a list of lists of ranks, or its text: `"[(0,), (0, 0), (1,)]"`.

    Raises:
        ConfigError: it is not a list of paths, or a node's parent is missing.
    """
    nodes = _read(value)
    if not nodes or not all(isinstance(node, list | tuple) and node for node in nodes):
        raise ConfigError(
            f"speculative_config: {TREE} must be a list of paths such as [[0], [0, 0], [1]], got {shown(value)}"
        )
    found = {tuple(node) for node in nodes}
    for node in found:
        if not all(type(rank) is int and rank >= 0 for rank in node):
            raise ConfigError(f"speculative_config: {TREE}: ranks must be whole numbers from 0, got {shown(node)}")
        if node[:-1] and node[:-1] not in found:
            raise ConfigError(f"speculative_config: {TREE} has {shown(node)}, but not its parent {shown(node[:-1])}")
    return tuple(sorted(found, key=lambda node: (len(node), node)))


def _read(value: object) -> list[Any]:
    try:
        read = ast.literal_eval(value) if isinstance(value, str) else value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        read = None
    return list(read) if isinstance(read, list | tuple) else []


def _set_tree(shape: Keys, tree: tuple[Path, ...], names: Collection[str]) -> None:
    """Set the keys of *shape* for *tree* with the methods *names*."""
    depth, width = len(tree[-1]), 1 + max(rank for node in tree for rank in node)
    if width == 1:
        shape |= {SHAPE: "chain"}
        shape.setdefault(TOKENS, depth)
    elif STATIC.intersection(names) or any(map(is_import_path, names)):
        shape[TREE] = tree
        shape.setdefault(TOKENS, min(MAX_SPECULATIVE_TOKENS, len(tree)))
    elif GROWN.intersection(names):
        shape |= {TOPK: width, STEPS: depth}
        shape.setdefault(TOKENS, min(MAX_SPECULATIVE_TOKENS, len(tree)))
        warn_once(
            f"speculative_config: {TREE}: this method drafts dynamic trees; the static tree was converted to "
            f"{TOPK} {width}, {STEPS} {depth}"
        )
    else:
        raise ConfigError(
            f"speculative_config: {TREE} has branches, but {', '.join(sorted(names))} cannot draft them; "
            f"{', '.join(sorted(STATIC | GROWN))} can"
        )


def _number(shape: Mapping[str, Any], key: str) -> int | None:
    value = shape.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not str(value).isdecimal() or int(value) < 1:
        raise ConfigError(f"speculative_config: {key} must be a whole number of at least 1, got {shown(value)}")
    return int(value)
