"""The products with quantised weights compile for GPUs that are not there, and keep everything in registers."""

from pathlib import Path

import pytest

from tests.gpu.test_cross_compile import run_child

CHILD = """
from workers.gpu.kernels.quantized import WARPS, Form
from workers.gpu.kernels.quantized_kernels import product_kernel as kernel

columns, inputs, group, code, has_zeros, kind, rows, experts, arch = json.loads(sys.argv[1])
form = Form(rows, experts, columns, inputs, group, -(-inputs // group))
constants = form.constants(code, kind, has_zeros=has_zeros, has_bias=True)
unused = {0: ("ids_S", "order_S", "bounds_E1", "tiles_E"), 1: ("order_S", "bounds_E1", "tiles_E"), 2: ()}[kind]
constants |= dict.fromkeys(unused) | ({} if has_zeros else {"zeros": None})
known = {"x": "*bf16", "codes": "*u8", "scales": "*i32" if code == 3 else "*fp32", "zeros": "*i32", "bias": "*bf16"}
known |= {"output": "*bf16" if form.spans == 1 else "*fp32", "ids_S": "*i64", "order_S": "*i64"}
known |= dict.fromkeys(("bounds_E1", "tiles_E"), "*i32")
signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
names = [name for name in known if name not in constants] + ["padded", "columns", "inputs", "x_stride", "span"]
aligned, settings = map(kernel.arg_names.index, names), {"num_warps": WARPS}
"""
INT8, INT4, FP8, FP4 = range(4)
SHAPES = {
    "llama 8b, keys, int8": (1024, 4096, 4096, INT8, False),
    "llama 8b, down, int4": (4096, 14336, 128, INT4, True),
    "llama 8b, gate, int4 in groups of 32": (14336, 4096, 32, INT4, False),
    "qwen3 8b, gate, fp8": (12288, 4096, 4096, FP8, False),
    "qwen3 8b, down, fp8 in blocks": (4096, 12288, 128, FP8, False),
    "gpt-oss 20b, attention, int8": (4096, 2880, 2880, INT8, False),
}
EXPERTS = {
    "gpt-oss 20b, ups, mxfp4": (5760, 2880, 32, FP4, False),
    "gpt-oss 20b, downs, int4": (2880, 2880, 128, INT4, True),
}


def test_mxfp4_of_experts_compiles_without_spills(tmp_path: Path) -> None:
    run_child(CHILD, [*EXPERTS["gpt-oss 20b, ups, mxfp4"], 1, 4, 32, 90], tmp_path)


CASES = [(shape, rows, arch) for shape in SHAPES for rows in (1, 512) for arch in (80, 90, 100)]
SPILLED = {("llama 8b, keys, int8", 1, 100): 4}


@pytest.mark.full
@pytest.mark.parametrize(("shape", "rows", "arch"), CASES)
def test_layers_compile_without_spills(shape: str, rows: int, arch: int, tmp_path: Path) -> None:
    run_child(CHILD, [*SHAPES[shape], 0, rows, 0, arch], tmp_path, SPILLED.get((shape, rows, arch), 0))


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(("kind", "rows"), [(1, 4), (2, 128), (2, 4096)])
@pytest.mark.parametrize("shape", EXPERTS)
def test_experts_compile_without_spills(shape: str, kind: int, rows: int, arch: int, tmp_path: Path) -> None:
    run_child(CHILD, [*EXPERTS[shape], kind, rows, 32, arch], tmp_path)
