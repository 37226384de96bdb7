"""Drafts that read a window of their KV cache, where contexts are long and reading the KV cache is most of a step.

    python -m benchmarks.long_context [--context 4096] [--rows 8] [--window 256] [--acceptance 0.8] [--blocks 4]

A random target with many KV heads and few weights, and its first layers as the draft model. All rows decode after
prompts of the given length, which the prefix cache holds. Sides take turns, block by block: without speculation, with
the draft reading everything, with the draft reading sinks and a window, and with the target itself as the draft, over
the same window (`self_window`). These have a fixed number of draft tokens; two more sides have the policies `adaptive`
and `threshold`, with the draft that reads everything. The table has the draft tokens for each token of an answer: a
policy does well if it has drafts where the fixed number of them is faster than none.

Random weights say nothing about acceptance. So draft tokens are accepted at a given rate on all sides, right or wrong
(the rule `synthetic`): the figures are of costs alone. What a window costs in acceptance depends on models and texts.
"""

import argparse
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared import measure
from slipstream import LLM, SamplingParams

VOCAB, HIDDEN, HEADS, HEAD_SIZE = 512, 256, 16, 64
LAYERS, DRAFT_LAYERS = 4, 1
OFF, FULL, WINDOW, SELF = "no speculation", "draft_model", "draft_model, window", "self_window"
ADAPTIVE, THRESHOLD = "draft_model, adaptive", "draft_model, threshold"
BYTES_PER_TOKEN = 2 * HEADS * HEAD_SIZE * 4
"""Of K and V of one layer, fp32."""
WARM_BLOCKS = 3
"""Blocks that are not counted: the first computes the prompts, and the policy counts what the draft spends on them for
each token of the answers that come after."""
TITLE = "| side | tokens per second | speed-up over no speculation | draft tokens per token |\n|---|---|---|---|"


@dataclass(frozen=True)
class ContextRow:
    """One side with one number of rows and one length of contexts."""

    side: str
    context: int
    rows: int
    tokens_per_second: float
    speedup: measure.Ratio
    drafted: float
    """Draft tokens for each token of an answer."""

    def __str__(self) -> str:
        return f"| {self.side} | {self.tokens_per_second:.1f} | {self.speedup} | {self.drafted:.2f} |"


def save_pair(folder: Path, longest: int) -> tuple[Path, Path]:
    """Save the target, and its first layers as a model of their own; return their folders."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=longest,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "target")
    model.model.layers = model.model.layers[:DRAFT_LAYERS]
    model.config.num_hidden_layers = DRAFT_LAYERS
    model.save_pretrained(folder / "draft")
    return folder / "target", folder / "draft"


def configurations(draft: Path, args: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Return `speculative_config` of every side."""
    k = args.num_speculative_tokens
    common = {
        "num_speculative_tokens": k,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [args.acceptance ** (depth + 1) for depth in range(k)],
    }
    full = {"model": str(draft), **common}
    window = {"draft_kv_window": args.window, "policy": "fixed", **common}
    return {
        OFF: None,
        FULL: full | {"policy": "fixed"},
        WINDOW: {"model": str(draft), **window},
        SELF: {"method": "self_window", **window},
        ADAPTIVE: full | {"policy": "adaptive"},
        THRESHOLD: full | {"policy": "threshold"},
    }


def engine(target: Path, speculative: dict[str, Any] | None, args: argparse.Namespace) -> LLM:
    """Return an engine whose KV cache holds all rows."""
    places = args.rows * (args.context + args.tokens + 64)
    return LLM(
        model=str(target),
        speculative_config=speculative,
        dtype="float32",
        max_num_seqs=args.rows,
        kv_cache_memory_bytes=places * BYTES_PER_TOKEN * (LAYERS + DRAFT_LAYERS),
        num_threads=args.threads,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
    )


def decode(llm: LLM, prompts: Sequence[dict[str, list[int]]], num_tokens: int, block: int) -> int:
    """Decode after all *prompts*; return the number of tokens."""
    params = SamplingParams(temperature=1.0, seed=block, ignore_eos=True, max_tokens=num_tokens, detokenize=False)
    return sum(len(output.outputs[0].token_ids) for output in llm.generate(prompts, params, use_tqdm=False))


def compare(args: argparse.Namespace) -> list[ContextRow]:
    """Measure all sides."""
    rng = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": rng.integers(3, VOCAB, args.context).tolist()} for _ in range(args.rows)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target, draft = save_pair(folder, args.context + 2 * args.tokens)
        sides = {
            name: stack.enter_context(engine(target, speculative, args))
            for name, speculative in configurations(draft, args).items()
            if not args.only or name in (OFF, *args.only.split(";"))
        }
        runs = {name: partial(decode, side, prompts, args.tokens) for name, side in sides.items()}
        measure.alternate(runs, range(WARM_BLOCKS))
        before = {name: llm.stats().proposed for name, llm in sides.items()}
        timings = measure.alternate(runs, range(WARM_BLOCKS, WARM_BLOCKS + args.blocks))
        drafted = {name: llm.stats().proposed - before[name] for name, llm in sides.items()}
    num_tokens = float(timings.tokens_B.sum())
    return [
        ContextRow(
            name,
            args.context,
            args.rows,
            timings.tokens_per_second(name),
            timings.speedup(name, OFF),
            drafted[name] / num_tokens,
        )
        for name in sides
    ]


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--context", type=measure.COUNT, default=4096, help="tokens of each prompt")
    parser.add_argument("--rows", type=measure.COUNT, default=8, help="requests at once")
    parser.add_argument("--window", type=measure.COUNT, default=256, help="draft_kv_window")
    parser.add_argument("--acceptance", type=float, default=0.8, help="probability that a draft token is accepted")
    parser.add_argument("--tokens", type=measure.COUNT, default=48, help="of each row in a block")
    parser.add_argument("--only", help="names of sides, separated by semicolons; that without speculation runs, too")
    parser.add_argument("--blocks", type=measure.COUNT, default=4, help="how often every side decodes")
    parser.set_defaults(num_speculative_tokens=4)
    args = parser.parse_args()
    found = compare(args)
    print(f"contexts of {args.context} tokens, {args.rows} rows, window {args.window}, acceptance {args.acceptance}")
    print(TITLE, *found, sep="\n")
    measure.write(
        args.output, {"environment": measure.environment(args.threads), "lines": [asdict(line) for line in found]}
    )


if __name__ == "__main__":
    main()
