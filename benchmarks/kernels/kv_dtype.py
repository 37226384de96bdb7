"""The time of attention over a KV cache in bf16, int8 and fp8, and the perplexity of the demo target with each.

    python -m benchmarks.kernels.kv_dtype [--threads 2] [--output figures.json]

Attention: one step of decoding, 32 rows with 1,000 tokens each, computed in bf16 by the kernel for CPUs. Every call
attends with another layer's K and V, as in a model: they come from memory, not from the processor's caches. The sides
alternate call by call, a different one first each time. "prefill" is a row of 512 new tokens after 512 known ones.

Perplexity: see `benchmarks.shared.perplexity`.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shared import measure
from benchmarks.shared.perplexity import heldout, perplexity
from demo import pair
from protos.config.engine import KVCacheDtype
from protos.layers import LayerShape
from workers.attention.backend import Options
from workers.attention.batch import AttentionMetadata
from workers.attention.kv import KVCache, bytes_per_block, stored_dtype
from workers.attention.native import NativeAttention

DTYPES: tuple[KVCacheDtype, ...] = ("bfloat16", "int8", "fp8")
HEADS, KV_HEADS = 8, 4
BLOCK = 16
LAYERS = 8
GIB = 1 << 30


@dataclass(frozen=True)
class DecodingStep:
    """Rows that are attended in one call: tokens known before, and fed."""

    name: str
    rows: int
    known: int
    fed: int


STEPS = (
    DecodingStep("32 rows x 1,000 tokens", 32, 999, 1),
    DecodingStep("32 rows x 1,000 tokens, 4 draft tokens", 32, 995, 5),
    DecodingStep("1 row x 1,000 tokens", 1, 999, 1),
    DecodingStep("prefill", 1, 512, 512),
)


class CachedAttention:
    """Attention over a cache of one dtype, filled with random K and V."""

    def __init__(self, stored: KVCacheDtype, step: DecodingStep, size: int) -> None:
        width = -(-(step.known + step.fed) // BLOCK)
        blocks_SB = np.random.default_rng(0).permutation(step.rows * width).astype(np.int32).reshape(step.rows, width)
        cache = KVCache(
            [LayerShape(KV_HEADS, size, size)] * LAYERS,
            blocks_SB.size,
            BLOCK,
            stored_dtype(stored, torch.bfloat16),
            torch.device("cpu"),
        )
        index_T = torch.arange(blocks_SB.size * BLOCK)
        for layer in range(LAYERS):
            generator = torch.Generator().manual_seed(layer)
            cache.write(layer, index_T, *torch.randn(2, len(index_T), KV_HEADS, size, generator=generator))
        self._attention = NativeAttention(cache)
        fed_R = np.full(step.rows, step.fed)
        known_R, rows_R = np.full(step.rows, step.known), np.arange(step.rows)
        self._metadata = AttentionMetadata(known_R, fed_R, np.cumsum(fed_R) - fed_R, rows_R, blocks_SB, BLOCK)
        self._new = [_normal(heads, step.rows * step.fed, size) for heads in (HEADS, KV_HEADS, KV_HEADS)]
        self._options = Options(size**-0.5)

    def __call__(self, layer: int) -> int:
        """Attend once; the plan of a step is made once for all layers, and is not part of the time."""
        if layer == 0:
            self._attention.plan(self._metadata)
        query, key, value = self._new
        self._attention.attend(layer, query, key, value, self._options)
        return 1


def _normal(heads: int, tokens: int, size: int) -> torch.Tensor:
    values = torch.randn(1, tokens, heads, size, generator=torch.Generator().manual_seed(heads))
    return values.bfloat16().transpose(1, 2)


def attention(step: DecodingStep, size: int, passes: int) -> dict[str, Any]:
    """Return the median milliseconds of a call in bf16, and the time of the other dtypes relative to it."""
    sides: dict[str, Callable[[int], int]] = {stored: CachedAttention(stored, step, size) for stored in DTYPES}
    calls = [layer for _ in range(passes) for layer in range(LAYERS)]
    measure.alternate(sides, range(LAYERS))
    times = measure.alternate(sides, calls)
    bf16_ms = 1e3 * float(np.median(times.seconds["bfloat16"]))
    ratios = {stored: times.slowdown(stored, "bfloat16") for stored in DTYPES[1:]}
    shown = ", ".join(f"{stored} {ratio}" for stored, ratio in ratios.items())
    print(f"{step.name}, heads of {size}: bf16 {bf16_ms:.3f} ms; of its time: {shown}", flush=True)
    return {"step": step.name, "size": size, "bf16_ms": bf16_ms, **{k: asdict(v) for k, v in ratios.items()}}


def perplexities(target: Path, draft: Path, texts: int, dtype: str) -> dict[str, Any]:
    """Return the perplexity of both demo models with every KV dtype."""
    starts = heldout(target, texts)
    found: dict[str, Any] = {}
    for name, model in (("target", target), ("draft", draft)):
        own = {stored: perplexity(model, starts, dtype=dtype, kv_cache_dtype=stored) for stored in ("auto", *DTYPES)}
        found[name] = own
        shown = ", ".join(f"{stored} {value:.4f} ({value / own['auto'] - 1:+.3%})" for stored, value in own.items())
        print(f"perplexity of the {name} in {dtype}, by KV dtype: {shown}", flush=True)
    return found


def blocks_per_gib(size: int) -> dict[KVCacheDtype, int]:
    """Return how many blocks of a model with 32 layers and 8 K/V heads fit into 1 GiB."""
    shapes = [LayerShape(8, size, size)] * 32
    found = {s: GIB // bytes_per_block(shapes, BLOCK, stored_dtype(s, torch.bfloat16)) for s in DTYPES}
    shown = ", ".join(f"{stored} {count} ({count / found['bfloat16']:.3f})" for stored, count in found.items())
    print(f"blocks of {BLOCK} tokens per GiB, heads of {size}: {shown}", flush=True)
    return found


def main() -> None:
    """Run what the arguments ask for."""
    parser = measure.arguments(__doc__)
    parser.add_argument("--passes", type=measure.COUNT, default=12, help="over all layers, of every step")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 128], help="of heads")
    parser.add_argument("--texts", type=measure.at_least(0), default=8, help="of 1,000 tokens; 0: no perplexity")
    parser.add_argument("--dtype", default="float32", help="that models compute in")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {"environment": measure.environment(options.threads)}
    found["blocks"] = {size: blocks_per_gib(size) for size in options.sizes}
    timed = partial(attention, passes=options.passes)
    with torch.inference_mode():
        found["attention"] = [timed(step, size) for size in options.sizes for step in STEPS]
        if options.texts:
            target, draft = pair()
            models = options.model or target, options.draft or draft
            found["perplexity"] = perplexities(*models, options.texts, options.dtype)
    measure.write(options.output, found)


if __name__ == "__main__":
    main()
