"""Paged attention for any `transformers` causal LM, through one registered attention function.

The tokens of all rows are flattened to `[1, T]`. For each layer the function writes K and V into the paged cache and
attends row by row: causally, or by the tree masks of drafts (`workers.attention.batch.TreeMask`). Block tables,
positions and masks are not passed through the model. Instead the runner plans them in its backend, and calls the model
within `run_with`, which makes that backend current for one forward.

No mask function is registered, so `transformers` builds no mask for this name.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from transformers import AttentionInterface

from protos.errors import ModelError
from workers.attention.batch import AttentionMetadata

NAME = "slipstream_paged"
HARMLESS = frozenset({"dropout", "position_ids", "use_cache", "cache_position", "output_attentions"})
"""Arguments of models that do not change attention here; other unknown ones are an error."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Options:
    """Options of one layer's attention.

    Attributes:
        scaling: factor of scores.
        window: number of positions that a token attends to, its own and those right before; 0: all.
        softcap: 0.0: none.
        sinks_H: sink logits of gpt_oss.
        window_from_block: tokens that a tree mask covers have the window of the first place that it covers. It hides
            none of the covered places.
        causal_block: tokens that a tree mask covers attend to no position after their own, even if the mask lets them.
    """

    scaling: float
    window: int = 0
    softcap: float = 0.0
    sinks_H: torch.Tensor | None = None
    window_from_block: bool = False
    causal_block: bool = False


class AttentionBackend(Protocol):
    """Writes K and V into pages and attends over them.

    With `takes_padding`, `attend` accepts tokens after those of the plan: their K and V are not written, and their
    output is 0.
    """

    takes_padding: ClassVar[bool]

    def plan(self, metadata: AttentionMetadata) -> None:
        """Prepare what all layers of the next forward share."""
        ...

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Write K and V of the T tokens, then attend.

        Args:
            layer: index of the layer.
            query_1HTD: `[1, heads, T, key_size]`, any strides, last dimension contiguous.
            key_1GTD: `[1, kv_heads, T, key_size]`.
            value_1GTE: `[1, kv_heads, T, value_size]`.
            options: scaling, window, soft cap and sinks.

        Returns:
            A contiguous `[1, T, heads, value_size]`.
        """
        ...


class Absorbed(Protocol):
    """Of an attention module whose K and V are latents: see `workers.attention.latent`."""

    def queries(self, query_1HTD: torch.Tensor) -> torch.Tensor:
        """Return queries of latents, `[1, heads, T, key_size]`."""
        ...

    def outputs(self, output_1THL: torch.Tensor) -> torch.Tensor:
        """Return what attention over values returns, from what it returned over latents."""
        ...


class _Current(threading.local):
    """The backend of the forward that runs in this thread, and its number of tokens. Set by `run_with`."""

    backend: AttentionBackend | None = None
    num_tokens: int | None = None


_CURRENT = _Current()
TOLD: list[Callable[[AttentionBackend | None], object]] = []
"""Called in each thread with what becomes its current backend."""


def run_with(backend: AttentionBackend, forward: Callable[[], Result], num_tokens: int | None = None) -> Result:
    """Call *forward* with *backend* as the current one; tokens after the first *num_tokens* are padding."""
    previous = _CURRENT.backend, _CURRENT.num_tokens
    try:
        _make_current(backend, num_tokens)
        return forward()
    finally:
        _make_current(*previous)


def _make_current(backend: AttentionBackend | None, num_tokens: int | None) -> None:
    _CURRENT.backend, _CURRENT.num_tokens = backend, num_tokens
    for tell in TOLD:
        tell(backend)


def _op(  # noqa: PLR0917 - the operator's schema
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    scaling: float,
    window: int,
    softcap: float,
    window_from_block: bool,
    causal_block: bool,
) -> torch.Tensor:
    backend = _CURRENT.backend
    if backend is None:
        raise RuntimeError(f"a model loaded with {NAME} attention runs only through ModelRunner")
    options = Options(scaling, window, softcap, sinks, window_from_block, causal_block)
    size = _CURRENT.num_tokens
    if size is None or query.shape[2] == size or backend.takes_padding:
        return backend.attend(layer, query, key, value, options)
    output = _shape(query, key, value).zero_()
    output[:, :size] = backend.attend(layer, query[:, :, :size], key[:, :, :size], value[:, :, :size], options)
    return output


def _shape(query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, *_: object) -> torch.Tensor:
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _define_op() -> torch.library.Library:
    # torch.compile does not trace into a custom op. The cache is not declared as mutated: nothing else in a graph
    # uses it, and the data flow of the hidden states orders the layers.
    library = torch.library.Library("slipstream", "DEF")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "paged_attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, int layer, float scaling, "
        "int window, float softcap, bool window_from_block, bool causal_block) -> Tensor"
    )
    library.impl("paged_attention", _op, "CPU")  # type: ignore[no-untyped-call]
    library.impl("paged_attention", _op, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake("slipstream::paged_attention", _shape, lib=library)
    return library


_LIBRARY = _define_op()


def paged_attention(  # noqa: PLR0917 - the signature is transformers'
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    window_from_block: bool = False,
    causal_block: bool = False,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function `transformers` calls in each layer: `[1, heads, T, size]` in, `[1, T, heads, size]` out."""
    for name in others.keys() - HARMLESS:
        if others[name] is not None and others[name] is not False:
            raise ModelError(
                f"{type(module).__name__} passes {name!r} to attention, which paged attention does not support"
            )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window, cap = sliding_window or 0, softcap or 0.0
    absorbed: Absorbed | None = getattr(module, "absorbed", None)
    if absorbed is not None:
        query = absorbed.queries(query)
    output = torch.ops.slipstream.paged_attention(
        query, key, value, s_aux, module.layer_idx, scale, window, cap, window_from_block, causal_block
    )
    return output if absorbed is None else absorbed.outputs(output), None


AttentionInterface.register(NAME, paged_attention)
