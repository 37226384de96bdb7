"""The convolutions and recurrences of `transformers`, over rows that begin with states of their own.

`transformers`' functions take a batch of equally long sequences. Those here are called in their place with the tokens
of all rows, `[1, T]`, and call them for rows that are equally long.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from workers.recurrent.pool import RecurrentStates
    from workers.recurrent.rows import ScanRun

CHUNK = 64
"""Most tokens of a block within a chunk; its results differ from those of other sizes by rounding only."""

Function = Callable[..., Any]


def run_conv(  # noqa: PLR0917 - the function's arguments
    states: "RecurrentStates",
    layer: int,
    function: Function,
    inputs_1CT: torch.Tensor,
    weight_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Return the causal convolution `[1, C, T]` of every row by *function*, `transformers`' `causal_conv1d_fn`."""
    inputs_TC = inputs_1CT[0].transpose(0, 1)
    before_RCW = states.conv(layer)
    if before_RCW is None:
        before_RCW = inputs_TC.new_zeros(states.plan.num_rows, inputs_TC.shape[1], weight_CW.shape[1] - 1)
    outputs_TC: torch.Tensor | None = None
    for run in states.plan.convs:
        own_GCL = run.rows.take(inputs_TC).transpose(1, 2)
        full_GCL = torch.cat([before_RCW if run.rows.are_all else before_RCW[run.rows.rows_G], own_GCL], -1)
        found_GCL = function(full_GCL, weight_CW, bias_C, activation)[:, :, -own_GCL.shape[2] :]
        outputs_TC = run.rows.put(outputs_TC, found_GCL.transpose(1, 2), states.plan.num_tokens)
        states.keep_conv(layer, run, full_GCL)
    assert outputs_TC is not None, "a forward has rows"
    return outputs_TC.transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class Scan:
    """A recurrence of `transformers`.

    Attributes:
        chunk: name of its function for several tokens, `[B, L, ...]`, which returns outputs and last states.
        step: name of the one that is called for one token.
        sequences: the arguments that have a value for each token.
        initial: the argument that is the state to begin with.
    """

    chunk: str
    step: str
    sequences: tuple[str, ...]
    initial: str

    def run(
        self, states: "RecurrentStates", layer: int, functions: tuple[Function, Function], given: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs `[1, T, ...]` of every row, and its last state.

        *functions* are those that `chunk` and `step` name, *given* the arguments of the former.
        """
        values = {name: self._by_token(given[name][0]) for name in self.sequences}
        shared = {name: value for name, value in given.items() if name not in self.sequences}
        states_R = states.scan(layer)
        outputs_T: torch.Tensor | None = None
        for run in states.plan.scans:
            before_G = None if states_R is None else _own(run, states_R)
            own = {name: run.rows.take(value_T) for name, value_T in values.items()}
            found_GL, after_G = self._call(functions, own, shared, before_G)
            outputs_T = run.rows.put(outputs_T, found_GL, states.plan.num_tokens)
            if states_R is None:
                states_R = after_G.new_zeros(states.plan.num_rows, *after_G.shape[1:])
            states_R[run.rows.rows_G] = after_G
            states.keep_scan(layer, run, after_G)
        assert outputs_T is not None, "a forward has rows"
        assert states_R is not None, "a forward has rows"
        return self._by_token(outputs_T).unsqueeze(0), states_R

    def _by_token(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values of an argument as `[T, ...]`, and what is so as the function would."""
        return values

    def _call(
        self,
        functions: tuple[Function, Function],
        own: dict[str, torch.Tensor],
        shared: dict[str, Any],
        before_G: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs `[G, L, ...]` of equally long rows, and the states after them."""
        size = own[self.sequences[0]].shape[1]
        shared = {**shared, self.initial: before_G, "chunk_size": min(CHUNK, size)}
        found_GL, after_G = functions[size == 1](**own, **shared)
        return found_GL, after_G


class SelectiveScan(Scan):
    """Mamba-1's. Its function for several tokens begins with zeros only, so that for one token is called for each.

    Its arguments have channels before tokens.
    """

    def _by_token(self, values: torch.Tensor) -> torch.Tensor:
        return values.transpose(0, 1)

    def _call(
        self,
        functions: tuple[Function, Function],
        own: dict[str, torch.Tensor],
        shared: dict[str, Any],
        before_G: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        inputs_GLC, decay_CN = own["hidden_states"], shared["A"]
        # In fp32, as that of the function for several tokens.
        state_GCN = inputs_GLC.new_zeros(len(inputs_GLC), *decay_CN.shape, dtype=torch.float32)
        if before_G is not None:
            state_GCN.copy_(before_G)
        always = {"A": decay_CN, "D": shared["D"], "dt_bias": shared["delta_bias"], "dt_softplus": True}
        found = [
            functions[1](state_GCN, **{name: value_GL[:, token] for name, value_GL in own.items()}, **always)
            for token in range(inputs_GLC.shape[1])
        ]
        return torch.stack(found, 1), state_GCN


def _own(run: "ScanRun", states_R: torch.Tensor) -> torch.Tensor:
    return states_R if run.rows.are_all else states_R[run.rows.rows_G]


_DELTA = ("query", "key", "value", "g", "beta")
SCANS = (
    # gated delta net: qwen3_next, qwen3_5, olmo_hybrid
    Scan("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", _DELTA, "initial_state"),
    # Kimi delta attention
    Scan("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention", _DELTA, "initial_state"),
    # Mamba-2. transformers' function for one token leaves out the limits of time steps.
    Scan("mamba2_chunk_scan", "mamba2_chunk_scan", ("hidden_states", "dt", "B", "C"), "initial_states"),
    SelectiveScan("mamba_selective_scan", "mamba_selective_state_update", ("hidden_states", "dt", "B", "C", "z"), ""),
)
CONV = "causal_conv1d_fn"


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name."""
    bound = signature.bind(*args, **kwargs).arguments
    extra: dict[str, Any] = bound.pop("kwargs", {})
    return {**bound, **extra}
