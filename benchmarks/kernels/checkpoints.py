"""Memory and perplexity of quantised checkpoints of one model, relative to it.

    python -m benchmarks.kernels.checkpoints FOLDER... [--model demo/target] [--texts 3]

Every folder that holds a `config.json`, at any depth, is a checkpoint. The model's tokenizer serves all of them. Memory
is that of weights loaded as bf16; the perplexity is measured in fp32.
"""

from pathlib import Path
from typing import Any

import torch

from benchmarks.shared import measure
from benchmarks.shared.perplexity import heldout, perplexity
from demo import pair
from protos.config.engine import ModelConfig
from workers.device import weight_bytes
from workers.model.loader import load


def figures(model: Path, tokenizer: Path, texts: list[list[int]]) -> dict[str, float]:
    """Return bytes of the weights as loaded, and the perplexity of *texts*."""
    loaded = load(ModelConfig(model=str(model), device="cpu", dtype="bfloat16", tokenizer=str(tokenizer)))
    value = perplexity(model, texts, dtype="float32", tokenizer=str(tokenizer))
    return {"bytes": weight_bytes(loaded.model), "perplexity": value}


def main() -> None:
    """Run what the arguments ask for."""
    parser = measure.arguments(__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--texts", type=measure.COUNT, default=3, help="of 1,000 tokens")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    base = options.model or pair()[0]
    texts = heldout(base, options.texts)
    found: dict[str, Any] = {"environment": measure.environment(options.threads)}
    plain = found["unquantised"] = figures(base, base, texts)
    print(f"unquantised: {plain['bytes'] / 1e6:.1f} MB, perplexity {plain['perplexity']:.3f}", flush=True)
    for folder in sorted(path.parent for top in options.folders for path in top.rglob("config.json")):
        own = found[str(folder)] = figures(folder, base, texts)
        change = own["perplexity"] / plain["perplexity"] - 1
        print(f"{folder}: {own['bytes'] / 1e6:.1f} MB, perplexity {own['perplexity']:.3f} ({change:+.2%})", flush=True)
    measure.write(options.output, found)


if __name__ == "__main__":
    main()
