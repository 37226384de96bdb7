"""The operators of `batch_invariant`: right by float64, and the same bits for a row in any batch."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.draft import Draft
from protos.layers import LayerShape
from tests.workers.attention.test_tree_attention import OneRow, filled, normal, rows_of
from workers.attention.backend import Options
from workers.attention.batch import TreeMask
from workers.invariant import native, ops
from workers.invariant import torch as tiled
from workers.invariant.attention import InvariantAttention
from workers.invariant.attention_cuda import SplitAttention

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Largest error of a result, relative to the largest result."""
WIDTHS = (1, 7, 16, 24, 33, 64, 97, 176)
EACH: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu_erf": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "cos": torch.cos,
    "sin": torch.sin,
    "rsqrt": lambda x: x.abs().rsqrt(),
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_near(found: torch.Tensor, exact: torch.Tensor) -> None:
    error = (found.double() - exact).abs().max().item()
    assert error <= ROUNDING[found.dtype] * max(1.0, exact.abs().max().item()), error


def bits(x: torch.Tensor) -> torch.Tensor:
    """Whether two tensors are equal bit by bit, NaNs and signs of zeros included."""
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("dtype", DTYPES)
@given(rows=st.integers(1, 70), columns=st.integers(1, 40), size=st.integers(1, 300), has_bias=st.booleans())
@settings(max_examples=25, deadline=None)
def test_products_are_right_and_the_same_alone(
    dtype: torch.dtype, rows: int, columns: int, size: int, has_bias: bool
) -> None:
    x, weight = drawn(rows, size, dtype=dtype), drawn(columns, size, dtype=dtype, seed=1)
    bias = drawn(columns, dtype=dtype, seed=2) if has_bias else None
    found = native.linear(x, weight, bias, ops.SHARDS, False)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    check_near(found, exact)
    for at in (0, rows // 2, rows - 1):
        assert same(native.linear(x[at : at + 1], weight, bias, ops.SHARDS, False), found[at : at + 1])
        assert same(native.linear(x[: at + 1], weight, bias, ops.SHARDS, False), found[: at + 1])
    column = columns // 2
    own = None if bias is None else bias[column : column + 1]
    assert same(native.linear(x, weight[column : column + 1], own, ops.SHARDS, False), found[:, column : column + 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_do_not_depend_on_threads_or_strides(dtype: torch.dtype) -> None:
    x, weight = drawn(37, 260, dtype=dtype), drawn(50, 260, dtype=dtype, seed=1)
    found = native.linear(x, weight, None, ops.SHARDS, False)
    torch.set_num_threads(3)
    assert same(native.linear(x, weight, None, ops.SHARDS, False), found)
    wide = drawn(37, 600, dtype=dtype)
    wide[:, 100:360] = x
    assert same(native.linear(wide[:, 100:360], weight.t().contiguous().t(), None, ops.SHARDS, False), found)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("size", [8, 48, 64, 1408])
def test_ranks_add_up_the_sums_that_one_adds_up(ranks: int, size: int) -> None:
    x, weight = drawn(9, size, dtype=torch.bfloat16), drawn(10, size, dtype=torch.bfloat16, seed=1)
    whole = native.linear(x, weight, None, ops.SHARDS, True)
    share = size // ranks
    parts = [
        native.linear(
            x[:, r * share : (r + 1) * share], weight[:, r * share : (r + 1) * share], None, ops.SHARDS // ranks, True
        )
        for r in range(ranks)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2], strict=True)]
    assert same(parts[0], whole)
    assert not same(whole, x.float() @ weight.float().t()), "torch adds up in the same order: equal bits prove nothing"


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_are_products_of_their_own(is_transposed: bool) -> None:
    x, weight_ENK = drawn(12, 48, dtype=torch.bfloat16), drawn(3, 10, 48, dtype=torch.bfloat16, seed=1)
    weight_EKN = weight_ENK.mT.contiguous() if is_transposed else weight_ENK.mT
    found = native.grouped(x, weight_EKN, torch.tensor([5, 5, 12]), ops.SHARDS, False)
    assert same(found[:5], native.linear(x[:5], weight_ENK[0], None, ops.SHARDS, False))
    assert same(found[5:], native.linear(x[5:], weight_ENK[2], None, ops.SHARDS, False))
    assert same(native.grouped(x[6:8], weight_EKN, torch.tensor([0, 0, 2]), ops.SHARDS, False), found[6:8])


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_are_right_and_the_same_anywhere(name: str, dtype: torch.dtype) -> None:
    rare = torch.tensor([0.0, -0.0, 1e-30, 60.0, -60.0, 88.0, -88.0]).repeat(14)[None, :97]
    x = torch.cat([drawn(180, 97) * 4, rare]).to(dtype)
    x = x.abs() + 1e-3 if name == "rsqrt" else x
    exact = EACH[name](x.double())
    found = native.each(x, ops.function_index(name))
    near = exact.abs() < torch.finfo(dtype).max
    error = ((found.double() - exact).abs() / (exact.abs() + 0.1))[near].max().item()
    assert error <= 4 * ROUNDING[dtype], error
    for at, width in ((0, 1), (5, 3), (11, 97)):
        assert same(native.each(x[at, :width], ops.function_index(name)), found[at, :width])
    torch.set_num_threads(3)
    assert same(native.each(x, ops.function_index(name)), found)
    assert same(native.each(x.t(), ops.function_index(name)).t(), found)


def test_functions_at_the_ends() -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 100.0, -200.0])
    assert same(native.each(x, ops.function_index("exp")), torch.tensor([torch.inf, 0.0, torch.nan, torch.inf, 0.0]))
    found = native.each(x, ops.function_index("sigmoid"))
    assert found[:2].tolist() == [1.0, 0.0]
    assert found[2].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", WIDTHS)
def test_rows_are_right_and_the_same_alone(size: int, dtype: torch.dtype) -> None:
    x = drawn(300, size, dtype=dtype) * 3
    weight, bias = drawn(size, dtype=dtype, seed=1), drawn(size, dtype=dtype, seed=2)
    wide = x.double()
    for work, exact in (
        (native.mean, wide.mean(-1, keepdim=True)),
        (native.softmax, wide.softmax(-1)),
        (
            lambda x: native.layer_norm(x, weight, bias, 1e-3),
            F.layer_norm(wide, (size,), weight.double(), bias.double(), 1e-3),
        ),
        (lambda x: native.layer_norm(x, None, None, 1e-3), F.layer_norm(wide, (size,), eps=1e-3)),
    ):
        found = work(x)
        check_near(found, exact)
        assert all(same(work(x[at : at + 1]), found[at : at + 1]) for at in (0, 1, 150, 299))
        torch.set_num_threads(3)
        assert same(work(x), found)
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_gpus_run_says_the_same_numbers(dtype: torch.dtype) -> None:
    x, weight_NK, bias = drawn(2, 70, 48, dtype=dtype), drawn(9, 48, dtype=dtype, seed=1), drawn(9, dtype=dtype, seed=2)
    norm = drawn(48, dtype=dtype, seed=3)
    experts = drawn(3, 48, 10, dtype=dtype, seed=4)
    ends = torch.tensor([20, 20, 70], dtype=torch.int32)
    for on_gpu, on_cpu in (
        (tiled.linear(x, weight_NK, bias, 8, False), native.linear(x, weight_NK, bias, 8, False)),
        (tiled.linear(x, weight_NK, None, 4, True), native.linear(x, weight_NK, None, 4, True)),
        (tiled.grouped(x[0], experts, ends, 8, False), native.grouped(x[0], experts, ends, 8, False)),
        (tiled.grouped(x[0], experts, ends, 4, True), native.grouped(x[0], experts, ends, 4, True)),
        (tiled.mean(x), native.mean(x)),
        (tiled.softmax(x), native.softmax(x)),
        (tiled.layer_norm(x, norm, None, 1e-5), native.layer_norm(x, norm, None, 1e-5)),
        *((tiled.each(x.abs() + 0.1, number), native.each(x.abs() + 0.1, number)) for number in range(len(EACH))),
    ):
        assert (on_gpu.shape, on_gpu.dtype) == (on_cpu.shape, on_cpu.dtype)
        check_near(on_gpu, on_cpu.double())


CHAIN, BRANCHES = Draft((0,) * 6, (-1, 0, 1, 2, 3, 4)), Draft((0,) * 8, (-1, -1, 0, 1, 2, 2, 5, 4))
"""The tree contains the branch 0, 2, 5, 6, which is as long as the chain's first four tokens."""


def attended(
    rows: list[OneRow], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
) -> torch.Tensor:
    laid_out = rows_of(rows)
    backend = InvariantAttention(filled(LayerShape(2, *SIZES), laid_out.blocks_SB.size, query.dtype))
    for pages in (*backend.cache.keys, *backend.cache.values):
        pages.zero_()
    backend.plan(laid_out)
    return backend.attend(0, query, key, value, options)[0]


SIZES = (24, 40)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("known", [3, 31, 32, 70])
@pytest.mark.parametrize("window", [0, 20])
def test_a_branch_is_attended_as_the_chain_it_is(known: int, window: int, dtype: torch.dtype) -> None:
    tokens = known + 8
    query, key, value = (
        normal(heads, tokens, size, seed).to(dtype)
        for seed, (heads, size) in enumerate(((4, SIZES[0]), (2, SIZES[0]), (2, SIZES[1])))
    )
    options = Options(0.2, window, 3.0, torch.linspace(-1, 1, 4))
    chain = attended([OneRow(0, tokens)], query, key, value, options)
    branch = [0, 2, 5, 6]
    nodes = [1, 3, 4, 7]
    order = [0] * 8
    for at, node in enumerate(branch):
        order[node] = known + at
    for at, node in enumerate(nodes):
        order[node] = known + 4 + at
    moved = torch.tensor([*range(known), *order])
    depths, ancestors = [0, 0, 1, 1, 2, 2, 3, 3], [0b1, 0b10, 0b101, 0b1010, 0b10101, 0b100101, 0b1100101, 0b10010101]
    tree_mask = TreeMask(known, [known + depth for depth in depths], ancestors)
    tree = attended([OneRow(0, tokens, tree_mask)], query[:, :, moved], key[:, :, moved], value[:, :, moved], options)
    assert same(tree[:known], chain[:known])
    assert same(tree[[known + node for node in branch]], chain[known : known + 4])


@pytest.mark.parametrize("window", [0, 10])
def test_a_query_is_attended_alone_as_among_others(window: int) -> None:
    query, key, value = (
        normal(heads, 90, size, seed).to(torch.bfloat16)
        for seed, (heads, size) in enumerate(((4, SIZES[0]), (2, SIZES[0]), (2, SIZES[1])))
    )
    options = Options(0.2, window)
    whole = attended([OneRow(0, 90)], query, key, value, options)
    for threads, first in ((1, 89), (3, 40), (1, 64)):
        torch.set_num_threads(threads)
        laid_out = rows_of([OneRow(0, first), OneRow(0, 7)])
        backend = InvariantAttention(filled(LayerShape(2, *SIZES), laid_out.blocks_SB.size, torch.bfloat16))
        backend.plan(laid_out)
        both = [torch.cat([part[:, :, :first], part[:, :, :7]], 2) for part in (query, key, value)]
        found = backend.attend(0, *both, options)[0]
        assert same(found[:first], whole[:first])
        assert same(found[first:], whole[:7])
        rest = rows_of([OneRow(first, 90 - first)])
        rest.blocks_SB[:] = 0
        blocks = laid_out.blocks_SB[0]
        rest.blocks_SB[0, : len(blocks)] = blocks
        free = [block for block in range(laid_out.blocks_SB.size) if block not in blocks]
        rest.blocks_SB[0, len(blocks) :] = free[: rest.blocks_SB.shape[1] - len(blocks)]
        backend.plan(rest)
        last = [part[:, :, first:] for part in (query, key, value)]
        assert same(backend.attend(0, *last, options)[0], whole[first:])


def test_a_split_that_a_query_does_not_see_changes_no_bit() -> None:
    query, key, value = (
        normal(heads, 300, size, seed)
        for seed, (heads, size) in enumerate(((4, SIZES[0]), (2, SIZES[0]), (2, SIZES[1])))
    )
    for options in (Options(0.2), Options(0.2, 9, 3.0, torch.linspace(-1, 1, 4))):
        laid_out = rows_of([OneRow(0, 300)])
        backend = SplitAttention(filled(LayerShape(2, *SIZES), laid_out.blocks_SB.size))
        backend.plan(laid_out)
        whole = backend.attend(0, query, key, value, options)[0]
        check_near(whole, attended([OneRow(0, 300)], query, key, value, options).double())
        short = rows_of([OneRow(0, 16)])
        short.blocks_SB[:] = laid_out.blocks_SB[:, : short.blocks_SB.shape[1]]
        backend.plan(short)
        assert same(backend.attend(0, query[:, :, :16], key[:, :, :16], value[:, :, :16], options)[0], whole[:16])
