"""`batch_invariant`: replaces the operators of a forward, one by one as they run, or once by tracing it."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from protos.errors import ConfigError
from workers.compile import TRIALS, Forward, Outputs, Trial
from workers.invariant import ops
from workers.invariant.rules import rule_of
from workers.weights.building import BUILDING

SIZES = (*TRIALS, (20, 5))
"""(tokens, wanted) with which a traced graph must give the same bits as replacing operators one by one."""

UNTRACED = "batch-invariant, every operator checked: "

Agree = Callable[[bool], bool]


class InvariantDispatch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's own lacks annotations
    """Replaces every operator that runs in this thread while it is active. See `workers.invariant.rules`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = rule_of(func)(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        with self:  # so that the operators it consists of are replaced
            found = func.decompose(*args, **(kwargs or {}))
        if found is NotImplemented:
            name = func.overloadpacket._qualified_op_name.replace("::", ".")
            raise ConfigError(f"batch_invariant: the model uses {name}, whose bits may depend on the batch")
        return found

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled while it is active; skipping dynamo takes longer than most operators


def active() -> AbstractContextManager[InvariantDispatch]:
    """Return the dispatch mode, to be entered for one forward."""
    mode: AbstractContextManager[InvariantDispatch] = InvariantDispatch()  # type: ignore[no-untyped-call]
    return mode


def invariant(forward: Forward) -> Forward:
    """Return *forward* with every operator checked and replaced as it runs."""

    def run(tokens_1T: torch.Tensor, positions_1T: torch.Tensor, wanted_N: torch.Tensor) -> Outputs:
        with active():
            return forward(tokens_1T, positions_1T, wanted_N)

    return run


def traced(
    forward: Forward, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], trial: Trial, agree: Agree
) -> tuple[Forward, str]:
    """Trace an `invariant` *forward* once, for all sizes: its operators then run without further checks.

    Args:
        forward: to be traced.
        inputs: tokens `[1, T]`, positions `[1, T]` and wanted `[N]` to trace with; T and N differ, neither is 1.
        trial: runs a forward on T made-up tokens with N wanted ones; returns logits, on rank 0 only. It runs
            collectives, so every rank makes the same trials, even if its own tracing failed.
        agree: returns whether its argument is true on all ranks. Only rank 0 has logits, and a wrong graph on another
            rank would change them.

    Returns:
        The graph, or *forward* itself if no graph gives the same bits, and a line for the user.
    """
    started = time.monotonic()
    expected = [trial(forward, *sizes) for sizes in SIZES]
    graph, problem = _trace(forward, inputs)
    try:
        found = [trial(graph or forward, *sizes) for sizes in SIZES]
    except Exception as error:  # a graph that works only for the sizes it was traced with
        return forward, UNTRACED + _failure(error)
    if not agree(all(map(torch.equal, found, expected))) or graph is None:
        return forward, UNTRACED + (problem or "traced logits differ")
    return graph, f"batch-invariant, {len(graph.graph.nodes)} operators traced in {time.monotonic() - started:.0f} s"


def _trace(forward: Forward, inputs: tuple[torch.Tensor, ...]) -> tuple[GraphModule | None, str]:
    """Return the graph of *forward*, or None and the reason."""
    try:
        with BUILDING, torch.inference_mode():
            graph: GraphModule = make_fx(forward, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*inputs)
    except Exception as error:  # whatever fails in tracing, replacing operators one by one works
        return None, _failure(error)
    _simplify(graph)
    return graph, ""


def _failure(error: Exception) -> str:
    reason = (str(error).strip().splitlines() or [""])[0][:200]
    return f"tracing failed: {type(error).__name__}: {reason}"


def _simplify(graph: GraphModule) -> None:
    """Call operators of `workers.invariant.ops` without torch's dispatcher, and remove unused nodes."""
    for node in graph.graph.nodes:
        with suppress(KeyError, TypeError):
            node.target = ops.ON_CPU[node.target]
    graph.graph.eliminate_dead_code()
    graph.recompile()
