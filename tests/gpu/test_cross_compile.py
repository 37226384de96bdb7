"""The attention kernels compile for GPUs that are not there, and keep everything in registers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import json, subprocess, sys
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
"""
END = """
source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=settings)
cubin = Path(sys.argv[2]) / "kernel.cubin"
cubin.write_bytes(made.asm["cubin"])
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
print(subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True).stdout)
print("asked for at launch:", made.metadata.shared)
"""
"""What every child begins and ends with. In between it finds `kernel`, `signature`, `constants`, the numbers of
`aligned` arguments, `arch` and the `settings` of the launch."""
CHILD = """
import torch
from workers.attention.backend import Options
from workers.gpu.kernels.shape import Shape
from workers.gpu.kernels.attention_kernels import attention_kernel as kernel

shape, arch, is_divided, length, has_trees = json.loads(sys.argv[1])
heads, kv_heads, key_size, value_size, window, has_sinks, values_in_keys = shape
options = Options(0.1, window, sinks_H=torch.zeros(1) if has_sinks else None)
sizes = heads, kv_heads, key_size, value_size, 16
shape = Shape(*sizes, options, has_trees=has_trees, arch=arch, values_in_keys=values_in_keys)
tile = shape.tile(length)
constants = shape.constants(tile) | {"ONE_TILE": length * shape.share <= tile, "IS_DIVIDED": is_divided}
if not has_sinks:
    constants["sinks"] = None
known = {**dict.fromkeys(("query", "keys", "values", "output_THE", "sinks"), "*bf16"), "visible_TW": "*i64"}
known |= dict.fromkeys(("sums", "stats"), "*fp32") | dict.fromkeys(("scaling", "softcap", "value_scale"), "fp32")
signature = {}
for name in kernel.arg_names:
    other = "*i32" if name.endswith(("_R", "_RB", "_RA")) else "i32"
    signature[name] = "constexpr" if name in constants else known.get(name, other)
names = ("query", "keys", "values", "output_THE", "sums", "stats", "tables_RB", "query_head", "query_token")
aligned, settings = map(kernel.arg_names.index, names), shape.settings(tile)
"""
WRITE_CHILD = """
from workers.gpu.kernels.cache import write_kernel as kernel
from workers.gpu.kernels.shape import power_of_two

(heads, kv_heads, key_size, value_size, window, has_sinks, values_in_keys), pages, arch = json.loads(sys.argv[1])
constants = {"KV_HEADS": kv_heads, "KEY": key_size, "VALUE": value_size, "VALUES_IN_KEYS": values_in_keys}
sizes = {"HEADS_PADDED": kv_heads, "KEY_PADDED": key_size, "VALUE_PADDED": value_size}
constants |= {name: power_of_two(size) for name, size in sizes.items()}
known = {**dict.fromkeys(("key", "value"), "*bf16"), **dict.fromkeys(("key_pages", "value_pages"), "*" + pages)}
known |= {**dict.fromkeys(("key_scale", "value_scale"), "fp32"), "cache_index_T": "*i64"}
signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
aligned = [i for i, name in enumerate(kernel.arg_names) if name not in constants and "scale" not in name]
settings = {}
"""
LAYER_CHILD = """
from workers.gpu.kernels import layer
from workers.gpu.kernels.shape import power_of_two

name, hidden, inner, head_size, has_norms, arch = json.loads(sys.argv[1])
kernel = getattr(layer, name)
half = head_size // 2
constants, warps = {
    "norm_kernel": ({"SIZE": hidden, "PADDED": power_of_two(hidden), "HAS_ADDED": True}, layer.warps(hidden)),
    "rotate_kernel": ({"HALF": half, "PADDED": power_of_two(half), "HAS_NORM": has_norms}, 1),
    "swiglu_kernel": ({"SIZE": inner, "BLOCK": layer.MOST}, 4),
}[name]
if name == "rotate_kernel" and not has_norms:
    constants |= {"query_weight_D": None, "key_weight_D": None}
signature = {}
for given in kernel.arg_names:
    other = "fp32" if given == "eps" else "i32" if given in ("heads", "width") else "*bf16"
    signature[given] = "constexpr" if given in constants else other
aligned = [i for i, given in enumerate(kernel.arg_names) if signature[given] == "*bf16"]
settings = {"num_warps": warps}
"""
SAMPLING_CHILD = """
from workers.gpu.kernels import limits, sampling, sampling_kernels

name, flags, arch = json.loads(sys.argv[1])
kernel = getattr(limits if name == "search_kernel" else sampling_kernels, name)
known = {"BLOCK": sampling.BLOCK, "PART": sampling.PART, "BLOCKS": 32, **flags}
needed = {"HAS_BITS": ("bits_MW", "bits_row_N"), "HAS_MIN_P": ("min_p_N",), "HAS_TOP_P": ("top_p_N", "ties_NB3")}
needed |= {"HAS_TOP_K": ("top_k_N", "kth_sums", "kth_prefixes")}
constants = {given: value for given, value in known.items() if given in kernel.arg_names}
for flag, arguments in needed.items():
    constants |= {given: None for given in arguments if given in kernel.arg_names and not flags[flag]}
floats = {"logits_NV", "temperature_N", "greatest_NB"}
doubles = {"min_p_N", "top_p_N", "scores_NB"} | ({"target_N"} if flags["BY_MASS"] else set())
signature = {}
for given in kernel.arg_names:
    is_array = given.endswith(("_N", "_NB", "_NB3", "_NV", "_MW", "sums", "prefixes"))
    words = given in {"bits_MW", "bits_row_N", "ids_NB"}
    kind = "fp32" if given in floats else "fp64" if given in doubles else "i32" if words or not is_array else "i64"
    signature[given] = "constexpr" if given in constants else "*" * is_array + kind
aligned = [i for i, given in enumerate(kernel.arg_names) if signature[given].startswith("*")]
settings = {"num_warps": sampling.WARPS}
"""
PENALTY_CHILD = """
from workers.gpu.kernels import penalties

name, arch = json.loads(sys.argv[1])
kernel = getattr(penalties, name)
constants = {"count_kernel": {"PADDED": 8}, "penalise_kernel": {"BLOCK": penalties.BLOCK}}[name]
kinds = {"logits_NV": "*fp32", "seen_SV": "*i32", "slots_R": "*i64", "new_RC": "*i64", "tokens_RQ": "*i64"}
kinds |= {"parents_RQ": "*i64"} | dict.fromkeys(("repetition_R", "presence_R", "frequency_R"), "*fp32")
signature = {given: "constexpr" if given in constants else kinds.get(given, "i32") for given in kernel.arg_names}
aligned = [i for i, given in enumerate(kernel.arg_names) if given in kinds]
settings = {"num_warps": penalties.WARPS if name == "penalise_kernel" else 1, "enable_fp_fusion": False}
"""
LAYERS = {"llama 8b": (4096, 14336, 128, False), "qwen3 8b": (4096, 12288, 128, True)}
SHAPES = {
    "llama and qwen3 8b": (32, 8, 128, 128, 0, False, False),
    "gpt-oss 20b": (64, 8, 64, 64, 128, True, False),
    "deepseek v3": (128, 1, 576, 512, 0, False, True),
    "deepseek v3 expanded": (128, 128, 192, 128, 0, False, False),
}
SPILLED = {("llama and qwen3 8b", 90): 68, ("deepseek v3 expanded", 80): 8}
"""Bytes that a thread spills in chunks. The first are outside the loop over keys that all queries see; measured on an
H200, more warps, which spill none, take longer."""
SEARCH_SPILLED = 8
"""Bytes of a pass of top-p's search: without them, half as many programs would run at once."""
ROOT = Path(__file__).parents[2]


def run_child(code: str, arguments: list[object], folder: Path, most_spilled: int = 0) -> None:
    """Compile in a process in which kernels are not interpreted; of each thread so many bytes may be spilled."""
    given = json.dumps(arguments)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    environment["TRITON_DUMP_PTXAS_LOG"] = "1"
    command = [sys.executable, "-c", BEGIN + code + END, given, str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    ((stored, loaded),) = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", ran.stdout)
    assert max(int(stored), int(loaded)) <= most_spilled, ran.stdout
    print(arguments, ran.stdout)  # pytest -rP shows the registers


def test_decode_compiles_without_spills(tmp_path: Path) -> None:
    run_child(CHILD, [SHAPES["llama and qwen3 8b"], 90, True, 1, True], tmp_path)


@pytest.mark.parametrize("shape", ["deepseek v3", pytest.param("llama and qwen3 8b", marks=pytest.mark.full)])
@pytest.mark.parametrize("pages", ["bf16", pytest.param("fp8e4nv", marks=pytest.mark.full)])
def test_writes_compile_without_spills(shape: str, pages: str, tmp_path: Path) -> None:
    run_child(WRITE_CHILD, [SHAPES[shape], pages, 90], tmp_path)


def compile_sampling(kernel: str, flags: dict[str, bool], arch: int, folder: Path) -> None:
    off = {"HAS_BITS": False, "HAS_TOP_K": False, "HAS_TOP_P": False, "HAS_MIN_P": False, "BY_MASS": False}
    spilled = SEARCH_SPILLED if flags.get("BY_MASS") else 0
    run_child(SAMPLING_CHILD, [kernel, {**off, **flags}, arch], folder, spilled)


def test_the_search_for_top_p_compiles(tmp_path: Path) -> None:
    compile_sampling("search_kernel", {"BY_MASS": True, "HAS_TOP_K": True, "HAS_MIN_P": True}, 90, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    ("kernel", "flags"),
    [
        ("search_kernel", {}),
        ("search_kernel", {"HAS_BITS": True}),
        ("search_kernel", {"BY_MASS": True}),
        ("search_kernel", {"BY_MASS": True, "HAS_BITS": True, "HAS_MIN_P": True}),
        ("search_kernel", {"BY_MASS": True, "HAS_TOP_K": True}),
        ("choose_kernel", {}),
        ("choose_kernel", {"HAS_BITS": True}),
        ("choose_kernel", {"HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True}),
        ("ties_kernel", {"HAS_TOP_K": True, "HAS_TOP_P": True, "HAS_MIN_P": True}),
    ],
)
def test_sampling_compiles(kernel: str, flags: dict[str, bool], arch: int, tmp_path: Path) -> None:
    compile_sampling(kernel, flags, arch, tmp_path)


@pytest.mark.parametrize("kernel", ["count_kernel", "penalise_kernel"])
@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.full), 90, pytest.param(100, marks=pytest.mark.full)]
)
def test_penalties_compile_without_spills(kernel: str, arch: int, tmp_path: Path) -> None:
    run_child(PENALTY_CHILD, [kernel, arch], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("kernel", ["norm_kernel", "rotate_kernel", "swiglu_kernel"])
@pytest.mark.parametrize("shape", LAYERS)
def test_kernels_of_layers_compile_without_spills(shape: str, kernel: str, arch: int, tmp_path: Path) -> None:
    run_child(LAYER_CHILD, [kernel, *LAYERS[shape], arch], tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("has_trees", [True, False])
@pytest.mark.parametrize("length", [1, 8, 512])
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_compiles_with_few_spills(
    shape: str, arch: int, length: int, has_trees: bool, tmp_path: Path
) -> None:
    is_divided = length < 512
    arguments = [SHAPES[shape], arch, is_divided, length, has_trees]
    run_child(CHILD, arguments, tmp_path, 0 if is_divided else SPILLED.get((shape, arch), 0))
