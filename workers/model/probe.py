"""Runs one token through a loaded model to find the shapes of its layers' K and V, and of their recurrent states."""

from typing import Any, ClassVar

import numpy as np
import torch

from protos.errors import ModelError, SlipstreamError
from protos.layers import LayerShape
from workers.attention.backend import Options, run_with
from workers.attention.batch import AttentionMetadata, Batch
from workers.recurrent.mixers import mixers, run_with_states
from workers.recurrent.pool import RecurrentShapes, ScratchStates

WITHOUT_STATE = frozenset({"mlp", "moe"})
"""Types of decoder layers that read no other token."""
NO_HEADS = LayerShape(0, 0, 0)


class Probe:
    """An attention backend that records the shapes of its inputs."""

    takes_padding: ClassVar[bool] = False

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def plan(self, metadata: AttentionMetadata) -> None:
        """Nothing to prepare."""

    def attend(
        self, layer: int, query_1HTD: torch.Tensor, key_1GTD: torch.Tensor, value_1GTE: torch.Tensor, options: Options
    ) -> torch.Tensor:
        """Record the layer's shape; return the value, which is the result for a single token."""
        self.shapes[layer] = LayerShape(key_1GTD.shape[1], key_1GTD.shape[3], value_1GTE.shape[3])
        share = query_1HTD.shape[1] // value_1GTE.shape[1]
        return value_1GTE.repeat_interleave(share, 1).transpose(1, 2).contiguous()


def probe(model: Any, name: str, ranks: int = 1) -> tuple[LayerShape, ...]:
    """Return the shape of every layer's K and V; with several *ranks*, of this one's shard.

    Recurrent layers, and those that are nothing but an MLP, have no heads.

    Raises:
        ModelError: a layer does not use the attention interface, passes an unknown option, or cannot be split.
    """
    found = Probe()
    try:
        _run_one_token(model, found)
    except SlipstreamError:
        raise
    except (RuntimeError, ValueError) as error:
        if ranks == 1:
            raise ModelError(f"{name} cannot be served: its code does not run on a token ({error})") from error
        raise ModelError(
            f"{name}: its code does not run on a share of its heads, with {ranks} ranks ({error}); "
            "use tensor_parallel_size=1"
        ) from error
    expected = set(range(int(model.config.num_hidden_layers)))
    lacking = sorted(expected - set(found.shapes) - _without_attention(model))
    if lacking or set(found.shapes) - expected:
        raise ModelError(f"{name} cannot be served: layers {lacking} do not attend through the attention interface")
    return tuple(found.shapes.get(layer, NO_HEADS) for layer in sorted(expected))


def _without_attention(model: Any) -> set[int]:
    types = getattr(model.config, "layer_types", None) or ()
    return {*mixers(model)} | {layer for layer, kind in enumerate(types) if kind in WITHOUT_STATE}


def probe_states(model: Any, name: str) -> RecurrentShapes:
    """Return the shapes of the states of a model's recurrent layers, which `workers.recurrent.mixers.adapt` changed.

    Raises:
        ModelError: this version of `transformers` runs them in a way that is not known.
    """
    first = np.zeros(1, np.int64)
    states = ScratchStates(Batch(first, first, first + 1, first), model.device)
    try:
        run_with_states(states, lambda: _run_one_token(model, Probe()))
    except (RuntimeError, TypeError, AttributeError, ValueError) as error:
        raise ModelError(f"{name} cannot be served: its recurrent layers do not run on a token ({error})") from error
    return states.shapes


def _run_one_token(model: Any, found: Probe) -> None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        run_with(found, lambda: model(input_ids=token, position_ids=token, use_cache=False))
