"""Runs the recurrent layers of `transformers` models over rows that continue from states of their own.

A layer's own code runs, with two of the functions that it calls replaced: its convolution and its recurrence, which
`workers.recurrent.scans` runs row by row. The layer is given no cache; its states are in `RecurrentStates`, which
`run_with_states` makes current for one forward. Without that, a layer is as it was.
"""

import inspect
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

import torch

from workers.recurrent.pool import RecurrentStates
from workers.recurrent.scans import CONV, SCANS, Function, Scan, arguments_of, run_conv

Result = TypeVar("Result")
CACHES = ("cache_params", "past_key_values")
"""What layers call the argument that is their cache."""


class _CurrentStates(threading.local):
    """The states of the forward that runs in this thread. Set by `run_with_states`."""

    states: RecurrentStates | None = None


_CURRENT = _CurrentStates()


def run_with_states(states: RecurrentStates | None, forward: Callable[[], Result]) -> Result:
    """Call *forward*, in which recurrent layers read and write *states*."""
    previous = _CURRENT.states
    _CURRENT.states = states
    try:
        return forward()
    finally:
        _CURRENT.states = previous


class _NoCache:
    """Stands for a cache, so that a layer asks for last states; it has none, and keeps none."""

    @staticmethod
    def has_previous_state(*_: Any, **__: Any) -> bool:
        return False

    @staticmethod
    def is_recording_past(*_: Any, **__: Any) -> bool:
        return False

    @staticmethod
    def get_conv_state(*_: Any, **__: Any) -> None:
        return None

    get_recurrent_state = get_conv_state

    @staticmethod
    def update_conv_state(inputs: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return inputs

    update_recurrent_state = update_conv_state


_NO_CACHE = _NoCache()


def mixers(model: Any) -> Mapping[int, torch.nn.Module]:
    """Return what keeps state in a model, by the index of its layer."""
    return {int(module.layer_idx): module for module in model.modules() if _is_mixer(module)}


def adapt(model: Any) -> bool:
    """Let the recurrent layers of *model* run within `run_with_states`; return whether it has any."""
    found = mixers(model)
    for layer, module in found.items():
        _replace_forward(module, layer)
    return bool(found)


def _own_forward(module: torch.nn.Module) -> FunctionType:
    forward = inspect.unwrap(type(module).forward)
    assert isinstance(forward, FunctionType), "modules define forward in Python"
    return forward


def _is_mixer(module: torch.nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    return isinstance(forward, FunctionType) and CONV in forward.__code__.co_names


def _replace_forward(module: torch.nn.Module, layer: int) -> None:
    own, before = _own_forward(module), module.forward
    rebound = _rebound(own, layer)
    cache = next(name for name in CACHES if name in inspect.signature(own).parameters)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if _CURRENT.states is None:
            return before(*args, **kwargs)
        return rebound(module, *args, **{**kwargs, cache: _NO_CACHE, "attention_mask": None})

    module.forward = forward


def _rebound(own: FunctionType, layer: int) -> FunctionType:
    """Return *own* with other functions in place of its convolution and its recurrence."""
    names = dict(own.__globals__)
    # The functions in torch: those of other packages keep states of other kinds.
    conv = inspect.unwrap(names[CONV])
    names[CONV] = partial(_conv, layer, conv)
    for scan in SCANS:
        if scan.chunk in own.__code__.co_names:
            functions = (inspect.unwrap(names[scan.chunk]), inspect.unwrap(names[scan.step]))
            names[scan.chunk] = partial(_scan, scan, layer, functions, inspect.signature(functions[0]))
    rebound = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    rebound.__kwdefaults__ = own.__kwdefaults__
    return rebound


def _states() -> RecurrentStates:
    assert _CURRENT.states is not None, "the forward was chosen because there are some"
    return _CURRENT.states


def _conv(  # noqa: PLR0917 - the signature is transformers'
    layer: int,
    function: Function,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    return run_conv(_states(), layer, function, hidden_states, weight, bias, activation)


def _scan(
    scan: Scan,
    layer: int,
    functions: tuple[Function, Function],
    signature: inspect.Signature,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return scan.run(_states(), layer, functions, arguments_of(signature, args, kwargs))
