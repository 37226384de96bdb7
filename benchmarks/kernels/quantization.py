"""Decoding with weights that are quantised while they are loaded, and the perplexity of the demo pair with them.

    python -m benchmarks.kernels.quantization [--layers 24] [--tokens 32] [--blocks 6] [--texts 8] [--pair-blocks 12]

A Llama with random weights, which are most of what a step reads, decodes one request at a time; sides take turns, block
by block. All run eager. "auto" is the dtype that the engine chooses for a bf16 checkpoint: fp32 on processors without
bf16 instructions. Pairs run without and with a draft, which is quantised likewise: the demo pair, compiled, and one of
the size of the Llama, eager, whose draft is right for three of four tokens.
"""

import argparse
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared import measure
from benchmarks.shared.perplexity import heldout, perplexity
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.texts import DEMO, requests
from benchmarks.shared.workload import Item
from cluster.gpu_check.models import save_pair
from demo import pair
from slipstream import LLM, SamplingParams

VOCAB, HIDDEN = 32_000, 1024
PLAIN, BF16 = "auto", "bfloat16"
SCHEMES = ("int8", "int4", "fp8")
PROMPT = [5] * 16
PAIR_TOKENS, LARGE_PAIR_TOKENS, PAIR_WARM_BLOCKS = 128, 64, 6
RIGHT = 0.75
"""Share of tokens for which the large pair's draft is right."""


@dataclass(frozen=True)
class Pair:
    """A target and a draft, the requests of each block, and options of their engines."""

    name: str
    target: Path
    draft: Path
    work: list[list[Item]]
    options: Mapping[str, Any] = field(default_factory=dict)


def save(folder: Path, layers: int) -> Path:
    """Save the random model, in bf16."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def decode(llm: LLM, tokens: int, _block: int) -> int:
    """Generate *tokens* tokens; return their number."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    [output] = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    return len(output.outputs[0].token_ids)


def speeds(options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens per second of each side, and how many times faster it is than the unquantised ones."""
    with ExitStack() as stack:
        folder = save(Path(stack.enter_context(tempfile.TemporaryDirectory())), options.layers)
        sides: dict[str, Callable[[int], int]] = {}
        choices: dict[str, dict[str, Any]] = {PLAIN: {}, BF16: {"dtype": BF16}}
        for side, chosen in (choices | {scheme: {"quantization": scheme} for scheme in SCHEMES}).items():
            side_engine = DemoEngine(folder, None, threads=options.threads, enforce_eager=True, **chosen)
            llm = stack.enter_context(side_engine.llm)
            sides[side] = partial(decode, llm, options.tokens)
        measure.alternate(sides, range(1))
        timings = measure.alternate(sides, range(options.blocks))
    found: dict[str, Any] = {}
    for side in sides:
        ratios = {base: timings.speedup(side, base) for base in (PLAIN, BF16)}
        shown = ", ".join(f"{ratio} of {base}" for base, ratio in ratios.items())
        print(f"{side}: {timings.tokens_per_second(side):.1f} tokens/s, {shown}", flush=True)
        found[side] = {base: asdict(ratio) for base, ratio in ratios.items()}
    return found


def demo_pair(blocks: int) -> Pair:
    """Return the demo pair, with prompts for so many blocks."""
    target, draft = pair()
    prompts = requests(target, PAIR_TOKENS)[DEMO]
    return Pair("pair", target, draft, [[prompts[index % len(prompts)]] for index in range(blocks)])


def large_pair(blocks: int, folder: Path) -> Pair:
    """Return a pair of random weights whose draft is right for a fixed share of tokens."""
    target, draft = save_pair("0.4B", "small-draft", RIGHT, "cpu", folder)
    prompts = torch.randint(VOCAB, (blocks, len(PROMPT)), generator=torch.Generator().manual_seed(0)).tolist()
    work = [[Item(tuple(ids), LARGE_PAIR_TOKENS)] for ids in prompts]
    return Pair("0.4B pair", target, draft, work, {"enforce_eager": True})


def pair_speeds(of: Pair, threads: int) -> dict[str, Any]:
    """Return how many times faster a target is with quantised weights, and with a draft quantised likewise."""
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        sides: dict[str, Callable[[list[Item]], int]] = {}
        for scheme in (None, *SCHEMES):
            speculation = {"model": str(of.draft), "num_speculative_tokens": 3, "quantization": scheme}
            for name, config in ((f"{scheme}", None), (f"{scheme}, draft", speculation)):
                options = {"threads": threads, "max_num_seqs": 1, "quantization": scheme, **of.options}
                engine = DemoEngine(of.target, config, **options)
                stack.enter_context(engine.llm)
                sides[name] = engine.all
        measure.alternate(sides, of.work[:PAIR_WARM_BLOCKS])
        timings = measure.alternate(sides, of.work[PAIR_WARM_BLOCKS:])
    for scheme in (None, *SCHEMES):
        name = f"{scheme}"
        over, gained = timings.speedup(name, "None"), timings.speedup(f"{name}, draft", name)
        tokens_s = timings.tokens_per_second(name)
        print(f"{of.name}, {name}: {tokens_s:.0f} tokens/s, {over} of unquantised; with the draft {gained}", flush=True)
        found[name] = {"tokens_per_second": tokens_s, "over": asdict(over), "draft": asdict(gained)}
    return found


def perplexities(count: int) -> dict[str, dict[str, float]]:
    """Return the perplexity of both demo models, plain and with every scheme."""
    found: dict[str, dict[str, float]] = {}
    for name, model in zip(("target", "draft"), pair(), strict=True):
        texts = heldout(model, count)
        own = {PLAIN: perplexity(model, texts, dtype="float32")}
        own |= {scheme: perplexity(model, texts, dtype="float32", quantization=scheme) for scheme in SCHEMES}
        found[name] = own
        shown = ", ".join(f"{side} {value:.4f} ({value / own[PLAIN] - 1:+.3%})" for side, value in own.items())
        print(f"perplexity of the {name}: {shown}", flush=True)
    return found


def main() -> None:
    """Run what the arguments ask for."""
    parser = measure.arguments(__doc__)
    parser.add_argument(
        "--layers", type=measure.COUNT, default=24, help="of the random model: 24 are 0.4 billion weights"
    )
    parser.add_argument("--tokens", type=measure.COUNT, default=32, help="of a block")
    parser.add_argument("--blocks", type=measure.at_least(0), default=6, help="0: they are not timed")
    parser.add_argument("--texts", type=measure.at_least(0), default=8, help="of 1,000 tokens; 0: no perplexity")
    parser.add_argument(
        "--pair-blocks", type=measure.at_least(0), default=0, help="of each pair; 0: they are not timed"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found: dict[str, Any] = {"environment": measure.environment(options.threads)}
    if options.texts:
        found["perplexity"] = perplexities(options.texts)
    if options.blocks:
        found["speed"] = speeds(options)
    if options.pair_blocks:
        blocks = options.pair_blocks + PAIR_WARM_BLOCKS
        found["pair"] = pair_speeds(demo_pair(blocks), options.threads)
        with tempfile.TemporaryDirectory() as folder:
            found["large_pair"] = pair_speeds(large_pair(blocks, Path(folder)), options.threads)
    measure.write(options.output, found)


if __name__ == "__main__":
    main()
