"""A machine that has the pretended GPU: what torch tells of its devices, and the events of its streams."""

import contextlib
import functools
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from triton.runtime.interpreter import InterpretedFunction

from tests.support.gpu.counts import where
from tests.support.gpu.graphs import PretendCapture, PretendGraph
from tests.support.gpu.pretend import Pretend, PretendTensor, pretended
from workers.attention.torch import TorchAttention
from workers.gpu.attention import pick_gpu_attention
from workers.gpu.choosing import has_kernels
from workers.gpu.fused import fuse_layers

MEMORY = 2 << 30
"""Bytes of the device, all of them free."""
EVENTS_APART = 0.0
"""Milliseconds between any two events."""
ATTENTION = F.scaled_dot_product_attention


@functools.cache
def _install_guard() -> None:
    """Compile and load the device guard, once for this process: without it torch of a CPU build knows no CUDA."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler is not None, "pretending a GPU needs a C++ compiler"
    folder = Path(torch.__file__).parent
    library = Path(tempfile.mkdtemp(prefix="slip-guard-")) / "guard.so"
    source = Path(__file__).with_name("guard.cpp")
    places = [f"-I{folder / 'include'}", f"-L{folder / 'lib'}"]
    command = [compiler, "-O0", "-std=c++20", "-shared", "-fPIC", *places, str(source), "-lc10", "-o", str(library)]
    subprocess.run(command, check=True)
    torch.ops.load_library(str(library))
    shutil.rmtree(library.parent)


class Machine(Pretend):
    """What counts, and all graphs that were captured."""

    def __init__(self) -> None:
        super().__init__()
        self.capture = PretendCapture(self)


class PretendEvent:
    """Stands for `torch.cuda.Event`."""

    def __init__(self, **_: object) -> None:
        self._asked: tuple[int, int] | None = None

    def record(self, _stream: object = None) -> None:
        """Take note of what was asked of the device: it is done in order."""
        gpu = pretended()
        self._asked = None if gpu is None else gpu.num_asked

    def elapsed_time(self, _end: object) -> float:
        """Return milliseconds: the same, whatever happened between two events."""
        return EVENTS_APART

    def synchronize(self) -> None:
        """Wait until what was asked of the device before is done."""
        gpu = pretended()
        if gpu is not None:
            gpu.sync(where(), self._asked)

    def query(self) -> bool:
        """Return whether that is done: at once, or never."""
        gpu = pretended()
        return gpu is None or gpu.is_over(self._asked)


class PretendStream:
    """Stands for `torch.cuda.Stream`."""

    def __init__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """Wait for the device."""
        _wait()

    def wait_event(self, _event: object) -> None:
        """Do nothing."""

    def wait_stream(self, _stream: object) -> None:
        """Do nothing."""


def _wait(*_: object) -> None:
    gpu = pretended()
    if gpu is not None:
        gpu.sync(where())


def _machine() -> Machine:
    gpu = pretended()
    assert isinstance(gpu, Machine)
    return gpu


def _attend(query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
    if not isinstance(query, PretendTensor):
        return ATTENTION(query, key, value, attn_mask=attn_mask, **options)
    assert isinstance(key, PretendTensor)
    assert isinstance(value, PretendTensor)
    assert attn_mask is None or isinstance(attn_mask, PretendTensor)
    held = [None if each is None else each.held for each in (query, key, value, attn_mask)]
    call = functools.partial(ATTENTION, **options)
    with torch.utils._python_dispatch._disable_current_modes():
        made = PretendTensor(call(*held))
    gpu = _machine()
    gpu.kernel("sdpa")
    if gpu.recorder is not None:
        gpu.recorder.kernel(call, (query, key, value, attn_mask), {}, made)
    return made


@contextlib.contextmanager
def pretended_gpu() -> Iterator[Machine]:
    """Let torch see one CUDA device in this thread, and compute on it; yield what counts."""
    with pretended_cuda(), Machine() as gpu:
        yield gpu


@contextlib.contextmanager
def pretended_cuda() -> Iterator[None]:
    """Let torch see one CUDA device in every thread, which a `Machine` that the thread enters is."""
    _install_guard()
    fakes: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.device_count": lambda: 1,
        "torch.cuda.get_device_properties": lambda _device: SimpleNamespace(name=threading.current_thread().name),
        "torch.cuda.get_device_capability": lambda _device=None: (9, 0),
        "torch.cuda.mem_get_info": lambda _device=None: (MEMORY, MEMORY),
        "torch.cuda.memory_allocated": lambda _device=None: 0,
        "torch.cuda.set_device": lambda _device: None,
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.synchronize": _wait,
        "torch.cuda.current_stream": lambda _device=None: PretendStream(),
        "torch.cuda.Event": PretendEvent,
        "torch.cuda.Stream": PretendStream,
        "torch.cuda.stream": lambda _stream: contextlib.nullcontext(),
        "torch.cuda.CUDAGraph": lambda: PretendGraph(_machine()),
        "torch.cuda.graph": lambda graph, **options: _machine().capture(graph, **options),
        "torch.cuda.graph_pool_handle": lambda: (0, 0),
        "torch.cuda._lazy_init": lambda: None,
        "torch.cuda._initialized": True,
        # Interpreted kernels take long; `interpreted_kernels` has them.
        "workers.gpu.attention.pick_gpu_attention": TorchAttention,
        "workers.gpu.fused.fuse_layers": lambda _model: 0,
        "workers.gpu.choosing.has_kernels": lambda _device: False,
        # Tensors of inference mode have no version counters, which subclasses of tensors need.
        "torch.inference_mode": lambda *_: torch.no_grad(),
        "torch.nn.functional.scaled_dot_product_attention": _attend,
    }
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    only_cpu = torch._C._only_lift_cpu_tensors()
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch(name, fake))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        torch._C._set_only_lift_cpu_tensors(True)
        try:
            yield
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(before)
            torch._C._set_only_lift_cpu_tensors(only_cpu)


@contextlib.contextmanager
def interpreted_kernels() -> Iterator[None]:
    """Let engines use Triton's kernels, and interpret them; each launch is counted as a kernel of the thread's GPU."""
    run, one_at_a_time = InterpretedFunction.run, threading.Lock()  # the interpreter replaces functions of triton

    def counted(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        def launch(*args: Any, **constants: Any) -> None:
            with one_at_a_time:
                run(kernel, *args, grid=grid, warmup=warmup, **constants)

        given = [*args, *constants.values()]
        if not any(isinstance(each, PretendTensor) for each in given):
            launch(*args, **constants)
            return
        assert not any(isinstance(each, torch.Tensor) and not isinstance(each, PretendTensor) for each in given)
        with torch.utils._python_dispatch._disable_current_modes():
            held = [each.held if isinstance(each, PretendTensor) else each for each in args]
            launch(*held, **constants)
        gpu = _machine()
        gpu.kernel(kernel.fn.__name__)
        if gpu.recorder is not None:
            gpu.recorder.kernel(launch, args, constants, None)

    with (
        mock.patch.object(InterpretedFunction, "run", counted),
        mock.patch("workers.gpu.attention.pick_gpu_attention", pick_gpu_attention),
        mock.patch("workers.gpu.fused.fuse_layers", fuse_layers),
        mock.patch("workers.gpu.choosing.has_kernels", has_kernels),
    ):
        yield
