"""Compiling a function of tensors to a shared library, and running such libraries.

`torch.export` traces the function, and Inductor compiles the graph ahead of time, with the weights as constants.
"""

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor
import torch._inductor.config

from workers.compile import UNCHECKED, CompileError, Weights
from workers.compiled.store import UNFINISHED
from workers.native.build import KernelUnavailableError
from workers.native.shims import SHIMS, Shim

Call = Callable[..., Any]

INDEX = "graphs.json"
LOUD = ("torch._dynamo", "torch._inductor", "torch.fx", "torch.export", "torch._export")

WANTS = (
    "No space left", "quota exceeded", "llocate memory", "memory exhausted", "out of memory", "signal terminated",
    "terminated with signal", "died with <Sig", "Killed",
)  # fmt: skip
"""Parts of errors for want of memory or disk, of torch, the C++ compiler, its linker and `subprocess`."""


@dataclass(frozen=True)
class Input:
    """An example of an input: its shape, dtype, and the dimension that counts tokens."""

    shape: tuple[int, ...]
    dtype: str
    dim: int

    @classmethod
    def of(cls, tensor: torch.Tensor, dim: int) -> "Input":
        """Describe *tensor*."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), dim)

    def made_up(self) -> torch.Tensor:
        """Return a tensor like it: random numbers, or small ids."""
        dtype = getattr(torch, self.dtype)
        if dtype.is_floating_point:
            return torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        return torch.arange(torch.Size(self.shape).numel(), dtype=dtype).reshape(self.shape) % 3


def compile_graph(folder: Path, name: str, call: Call, inputs: Seq[Input], weights: Weights, *, single: bool) -> None:
    """Compile *call* and add it to *folder*.

    Args:
        folder: of an entry that is being written.
        name: of the graph, unique in the folder.
        call: a function of tensors; the weights it closes over become constants.
        inputs: of an example call; with *single*, of one token.
        weights: of the model that it is a part of.
        single: compile it for the sizes of the example, else for any size above one.

    Raises:
        CompileError: it cannot be exported or compiled.
    """
    examples = tuple(one.made_up() for one in inputs)
    shapes = None if single else (tuple({one.dim: torch.export.Dim.DYNAMIC} for one in inputs),)
    options = {**weights.options[single], **UNCHECKED}
    try:
        with _quietly(), torch.inference_mode(False), torch.no_grad():
            program = torch.export.export(_Root(call), examples, dynamic_shapes=shapes, strict=False)
            shims = list(_loaded(program))
            options["aot_inductor.custom_ops_to_c_shims"] = {shim.operator: [shim.declaration] for shim in shims}
            (folder / f"{name}.shims").write_text("\n".join(str(shim.operator) for shim in shims))
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix=UNFINISHED) as made:
                options["aot_inductor.output_path"] = str(Path(made) / "graph.so")
                torch._inductor.aot_compile(_with_buffers(program), examples, options=options)
                Path(made, "graph.so").replace(folder / f"{name}.so")
                # Operators of Python are found through this file, which has the library's name.
                for calls in Path(made).glob("*.wrapper.json"):
                    shutil.move(calls, folder / f"{name}.json")
    except Exception as error:  # whatever fails in the compiler, eager works
        message = f"{name} cannot be compiled: {type(error).__name__}: {_telling_line(str(error))[:200]}"
        raise CompileError(message, may_pass=_is_for_want(error)) from error
    index = read_index(folder) | {name: list(inputs)}
    (folder / INDEX).write_text(json.dumps({key: [asdict(one) for one in value] for key, value in index.items()}))


def read_index(folder: Path) -> dict[str, list[Input]]:
    """Return the example inputs of every graph in *folder*."""
    path = folder / INDEX
    found = json.loads(path.read_text()) if path.is_file() else {}
    return {
        name: [Input(tuple(one["shape"]), one["dtype"], one["dim"]) for one in inputs] for name, inputs in found.items()
    }


def load_graph(folder: Path, name: str) -> Call:
    """Load a compiled function; it returns a list of tensors. Inputs have to be contiguous.

    Raises:
        CompileError: the library cannot be loaded.
    """
    try:
        called = (folder / f"{name}.shims").read_text().splitlines()
        for shim in SHIMS:
            if str(shim.operator) in called:
                shim.load()
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(folder / f"{name}.so"), 1)
    except (OSError, RuntimeError, KernelUnavailableError) as error:
        raise CompileError(f"{name} cannot be loaded: {str(error).splitlines()[0][:200]}") from error
    return lambda *tensors: runner.run(list(tensors))


def _telling_line(text: str) -> str:
    """Return the first error of a C++ compiler in *text*, which follows the command; without one, the first line."""
    lines = text.strip().splitlines() or [""]
    return next((line for line in lines if "error: " in line), lines[0])


def _is_for_want(error: BaseException | None) -> bool:
    """Whether *error*, or one that led to it, is of the system, or of a C++ compiler that lacked memory or disk."""
    if error is None:
        return False
    is_of_system = isinstance(error, OSError | MemoryError) or any(want in str(error) for want in WANTS)
    return is_of_system or _is_for_want(error.__cause__ or error.__context__)


def _loaded(program: torch.export.ExportedProgram) -> Iterator[Shim]:
    """Yield the shims of operators in *program* that can be loaded here; others are called by the dispatcher."""
    operators = {node.target for node in program.graph.nodes}
    for shim in SHIMS:
        if shim.operator in operators:
            with suppress(KernelUnavailableError):
                shim.load()
                yield shim


def _with_buffers(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """Return the exported function with its weights as buffers.

    They are plain attributes after export, and tracing adds a node for each use. Freezing removes an attribute with the
    first node that is folded away, while others still name it: fp32 weights with a cast to fp32 have two. A buffer has
    one.
    """
    module: torch.fx.GraphModule = program.module()
    for name in program.constants:
        owner, _, last = name.rpartition(".")
        holder = module.get_submodule(owner)
        constant = getattr(holder, last)
        if isinstance(constant, torch.Tensor) and last not in holder._buffers:
            delattr(holder, last)
            holder.register_buffer(last, constant)
    return module


class _Root(torch.nn.Module):
    """The root of an exported graph."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self._call = call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        outputs = self._call(*tensors)
        several = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(output for output in several if output is not None)


@contextmanager
def _quietly() -> Iterator[None]:
    """Turn off the compiler's warnings and log lines."""
    loud = [logging.getLogger(name) for name in LOUD]
    levels = [log.level for log in loud]
    for log in loud:
        log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for log, level in zip(loud, levels, strict=True):
            log.setLevel(level)
