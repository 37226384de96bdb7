"""The methods of a draft's module, compiled one by one.

A proposer calls the module's forward and its heads. A trial proposal shows which ones, with inputs of which shapes;
each is compiled for one token and for any number of them. What was not compiled runs eager.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from workers.compile import Weights, check_results, padded_size
from workers.compiled.graphs import Input, compile_graph, load_graph, read_index

NO_STEP = -1
"""The variant of a method without steps."""

Call = Callable[..., Any]
Context = Callable[[Call, int], Any]
"""Calls a function with attention that takes a number of made-up tokens."""


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

    @property
    def names(self) -> tuple[str, ...]:
        """The methods that may be compiled."""
        return tuple(self._methods)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Remember the shapes of calls inside."""
        for method in self._methods.values():
            method.seen = {}
        yield

    def compile_into(self, folder: Path, weights: Weights) -> None:
        """Compile the calls that were seen. Raises `CompileError`."""
        for method in self._methods.values():
            method.compile_into(folder, weights)

    def load(self, folder: Path, context: Context, dtype: torch.dtype) -> None:
        """Run compiled from now on. Raises `CompileError` if a result differs from eager; then nothing has changed."""
        index = read_index(folder)
        found = {name: method.checked(folder, index, context, dtype) for name, method in self._methods.items()}
        for name, method in self._methods.items():
            method.graphs = found[name]


class Method:
    """A method of a module: tensors whose dimension 0 (of `forward`: 1) counts tokens, and perhaps a step.

    Args:
        eager: the bound method.
        variants: number of different computations; step s computes as step s modulo this.

    Attributes:
        seen: arguments of the first call of each variant, for one token and for several, while it is watched.
        graphs: what is compiled, by variant and whether it is for one token.
    """

    def __init__(self, eager: Call, variants: int) -> None:
        self._eager, self._variants = eager, variants
        self._name = eager.__name__
        self._dim = 1 if self._name == "forward" else 0
        self.seen: dict[tuple[int, bool], tuple[Any, ...]] | None = None
        self.graphs: dict[tuple[int, bool], Call] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run the method, compiled where it is."""
        size = arguments[0].shape[self._dim]
        key = (next((given % self._variants for given in arguments if isinstance(given, int)), NO_STEP), size == 1)
        if self.seen is not None and size:
            self.seen.setdefault(key, arguments)
        graph = self.graphs.get(key)
        if graph is None:
            return self._eager(*arguments)
        outputs = graph(*(self._prepared(given, size) for given in arguments if isinstance(given, torch.Tensor)))
        cut = tuple(output.narrow(self._dim, 0, size) for output in outputs)
        return cut[0] if len(cut) == 1 else cut

    def compile_into(self, folder: Path, weights: Weights) -> None:
        """Compile what was seen. Raises `CompileError`."""
        for key, arguments in (self.seen or {}).items():
            inputs = [Input.of(given, self._dim) for given in arguments if isinstance(given, torch.Tensor)]
            call = self._call(key[0], inputs)
            compile_graph(folder, self._graph_name(key), call, inputs, weights, single=key[1])

    def checked(
        self, folder: Path, index: dict[str, list[Input]], context: Context, dtype: torch.dtype
    ) -> dict[tuple[int, bool], Call]:
        """Return the compiled graphs, each compared with eager. Raises `CompileError`."""
        keys = [(variant, single) for variant in range(NO_STEP, self._variants) for single in (False, True)]
        found = {key: load_graph(folder, name) for key in keys if (name := self._graph_name(key)) in index}
        for key, graph in found.items():
            inputs = index[self._graph_name(key)]
            tensors = [one.made_up() for one in inputs]
            size = tensors[0].shape[self._dim]
            expected = context(lambda: self._call(key[0], inputs)(*tensors), size)  # noqa: B023 - called at once
            results = context(lambda: graph(*tensors), size)  # noqa: B023 - called at once
            check_results(expected if isinstance(expected, tuple) else (expected,), results, dtype)
        return found

    def _call(self, variant: int, inputs: list[Input]) -> Call:
        """Return a variant as a function of tensors."""
        steps = () if variant == NO_STEP else (variant,)
        without_features = self._name == "forward" and len(inputs) == 2

        def call(*tensors: torch.Tensor) -> Any:
            return self._eager(*tensors, *((None,) if without_features else ()), *steps)

        return call

    def _graph_name(self, key: tuple[int, bool]) -> str:
        variant = "" if key[0] == NO_STEP else f"-{key[0]}"
        return f"{self._name}{variant}-{'one' if key[1] else 'any'}"

    def _prepared(self, given: torch.Tensor, size: int) -> torch.Tensor:
        """Pad to a size for which kernels exist."""
        extra = 0 if size == 1 else padded_size(size) - size
        if extra:
            given = F.pad(given, (*(0 for _ in range(2 * (given.dim() - 1 - self._dim))), 0, extra))
        return given.contiguous()
