"""Catches hidden states of the target while its forward runs, for proposers that are fed them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from protos.errors import ModelError
from protos.layers import FeatureSpec

Hook = Callable[..., None]


class Taps:
    """Hooks on a causal LM, which stay. They are traced along with the model where it is compiled.

    Args:
        model: a `transformers` causal LM, or a rank's share of one: hidden states are the same on all ranks.
        spec: which states.

    Raises:
        ModelError: a layer is asked for that the model does not have.
    """

    def __init__(self, model: Any, spec: FeatureSpec) -> None:
        self._caught: dict[int, torch.Tensor] = {}
        self._order = spec.inputs_of or (0,)
        if spec.inputs_of:
            self._tap_layers(model, spec.inputs_of)
        else:
            model.get_decoder().register_forward_hook(self._keep_last_state)

    def collect(self) -> torch.Tensor:
        """Return what the forward that has just run let by, `[T, F]`, and forget it."""
        states = [self._caught[place][0] for place in self._order]
        self._caught.clear()
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def _tap_layers(self, model: Any, places: tuple[int, ...]) -> None:
        layers = decoder_layers(model)
        strange = sorted(place for place in places if not 0 <= place <= len(layers))
        if strange:
            raise ModelError(f"the draft is fed the inputs of layers {strange}; the target has {len(layers)} layers")
        for place in set(places) - {len(layers)}:
            layers[place].register_forward_pre_hook(self._keep_input(place), with_kwargs=True)
        if len(layers) in places:
            layers[-1].register_forward_hook(self._keep_output(len(layers)))

    def _keep_input(self, place: int) -> Hook:
        def hook(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._caught[place] = inputs[0] if inputs else named["hidden_states"]

        return hook

    def _keep_output(self, place: int) -> Hook:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._caught[place] = output[0] if isinstance(output, tuple) else output

        return hook

    def _keep_last_state(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._caught[0] = output[0]


def decoder_layers(model: Any) -> nn.ModuleList:
    """Return the decoder layers of a causal LM."""
    count = int(model.config.num_hidden_layers)
    decoder = model.get_decoder()
    return next(module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) == count)
