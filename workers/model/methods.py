"""The methods of a draft's module, compiled one by one.

A proposer calls the module's forward and its heads. Each method is compiled for one token and for any number of them
when it is first called while `Methods.compiling`; afterwards, what was not compiled runs eager.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workers.compile import CompileError, Weights, compile_call, padded_size

logger = logging.getLogger(__name__)

Call = Callable[..., Any]


class Methods:
    """Wraps a `protos.draft_module.Module` for its proposer; has all its attributes."""

    def __init__(self, module: Any) -> None:
        self._module = module
        variants: dict[str, int] = getattr(module, "compiled_methods", {})  # modules of users may have none
        self._methods = {name: Method(getattr(module, name), count) for name, count in variants.items()}

    def __getattr__(self, name: str) -> Any:
        return self._methods[name] if name in self._methods else getattr(self._module, name)

    def __call__(self, *inputs: torch.Tensor | None) -> Any:
        """Call the module's forward."""
        return self.forward(*inputs)

    @contextmanager
    def compiling(self, weights: Weights) -> Iterator[None]:
        """Compile the methods that are called inside."""
        for method in self._methods.values():
            method.weights = weights
        try:
            yield
        finally:
            for method in self._methods.values():
                method.weights = None

    def summary(self) -> str:
        """Return a line for the user that says what runs compiled."""
        failures = [f"{name}: {method.failure}" for name, method in self._methods.items() if method.failure]
        count = sum(method.num_compiled for method in self._methods.values())
        if failures:
            return f"compiled {count} graphs; some methods run eager: {'; '.join(failures)}"
        return f"compiled {count} graphs" if count else "running eager"


@dataclass(frozen=True)
class Graph:
    """A compiled method, for one token or for any number."""

    run: Call
    is_single: bool


class Method:
    """A method of a module: tensors whose dimension 0 (of `forward`: 1) counts tokens, and perhaps a step.

    Args:
        eager: the bound method.
        variants: number of different computations; step s computes as step s modulo this.

    Attributes:
        weights: of the module, while it is being compiled.
        failure: why a part of it runs eager.
    """

    def __init__(self, eager: Call, variants: int) -> None:
        self._eager, self._variants = eager, variants
        self._dim = 1 if eager.__name__ == "forward" else 0
        self._graphs: dict[tuple[int, bool], Graph | None] = {}
        self.weights: Weights | None = None
        self.failure: str | None = None

    @property
    def num_compiled(self) -> int:
        """Number of compiled graphs."""
        return sum(graph is not None for graph in self._graphs.values())

    def __call__(self, *arguments: Any) -> Any:
        """Run the method, compiled where it is."""
        steps = tuple(given % self._variants for given in arguments if isinstance(given, int))
        size = arguments[0].shape[self._dim]
        key = (steps[0] if steps else 0, size == 1)
        if self.weights is not None and key not in self._graphs and size:
            self._graphs[key] = self._compile(self.weights, arguments, steps, is_single=size == 1)
        graph = self._graphs.get(key)
        if graph is None:
            return self._eager(*arguments)
        tensors = [self._prepared(given, size) for given in arguments if not isinstance(given, int)]
        return self._cut(graph.run(*tensors), size)

    def _compile(
        self, weights: Weights, arguments: tuple[Any, ...], steps: tuple[int, ...], *, is_single: bool
    ) -> Graph | None:
        model = self._eager

        def call(*tensors: torch.Tensor | None) -> Any:
            return model(*tensors, *steps)

        size = 1 if is_single else arguments[0].shape[self._dim]
        tensors = [self._prepared(_made_up(given), size) for given in arguments if not isinstance(given, int)]
        try:
            return Graph(compile_call(call, tensors, weights, is_single=is_single), is_single)
        except CompileError as error:
            self.failure = str(error)
            logger.warning("a draft's %s runs eager: %s", model.__name__, error)
            return None

    def _prepared(self, given: torch.Tensor | None, size: int) -> torch.Tensor | None:
        """Pad to a size for which kernels exist; make strides those of a contiguous tensor."""
        if given is None:
            return None
        extra = 0 if size == 1 else padded_size(size) - size
        if extra:
            given = F.pad(given, (*(0 for _ in range(2 * (given.dim() - 1 - self._dim))), 0, extra))
        return given.contiguous()

    def _cut(self, outputs: Any, size: int) -> Any:
        if isinstance(outputs, tuple):
            return tuple(output.narrow(self._dim, 0, size) for output in outputs)
        return outputs.narrow(self._dim, 0, size)


def _made_up(given: torch.Tensor | None) -> torch.Tensor | None:
    """Return random numbers in place of features, which may be all zeros in a trial."""
    if given is None or not given.is_floating_point():
        return given
    generator = torch.Generator(given.device).manual_seed(0)
    return torch.randn(given.shape, generator=generator, device=given.device).to(given.dtype)
