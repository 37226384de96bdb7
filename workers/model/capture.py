"""Captures hidden states of the target in its forward, for proposers that read them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from protos.errors import ModelError
from protos.layers import FeatureSpec

Hook = Callable[..., None]


class Taps:
    """Permanent hooks on a causal LM, compiled along with it.

    Args:
        model: a `transformers` causal LM, or a rank's shard of one: hidden states are the same on all ranks.
        spec: which states.

    Raises:
        ModelError: the model does not have one of the layers.

    Attributes:
        order: what each token's features are made of, in this order.
    """

    def __init__(self, model: Any, spec: FeatureSpec) -> None:
        self._captured: dict[int, torch.Tensor] = {}
        self.order = spec.inputs_of or (0,)
        if spec.inputs_of:
            self._tap_layers(model, spec.inputs_of)
        else:
            model.get_decoder().register_forward_hook(self._keep_last_state)

    def collect(self) -> torch.Tensor:
        """Return the states of the last forward, `[T, F]`, and drop them."""
        states = [self._captured[layer][0] for layer in self.order]
        self._captured.clear()
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def _tap_layers(self, model: Any, inputs_of: tuple[int, ...]) -> None:
        layers = decoder_layers(model)
        unknown = sorted(layer for layer in inputs_of if not 0 <= layer <= len(layers))
        if unknown:
            raise ModelError(f"the draft is fed the inputs of layers {unknown}; the target has {len(layers)} layers")
        for layer in set(inputs_of) - {len(layers)}:
            layers[layer].register_forward_pre_hook(self._keep_input(layer), with_kwargs=True)
        if len(layers) in inputs_of:
            layers[-1].register_forward_hook(self._keep_output(len(layers)))

    def _keep_input(self, layer: int) -> Hook:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._captured[layer] = inputs[0] if inputs else named["hidden_states"]

        return hook

    def _keep_output(self, layer: int) -> Hook:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def _keep_last_state(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._captured[0] = output[0]


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a causal LM."""
    count = int(model.config.num_hidden_layers)
    decoder = model.get_decoder()
    return next(module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
