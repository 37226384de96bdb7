"""Tiny quantised checkpoints made by AutoRound 0.16.1, in the formats of AutoGPTQ, AutoAWQ and its own.

Each folder has `config.json` and `model.safetensors` as AutoRound wrote them, and `logits.safetensors`: token ids
`[1, N]`, and the logits `[1, N, V]` of `transformers` in float64 with the weights that the library's own linear layers
give. They were made by

    python -m tests.support.checkpoints.auto_round.make

in an environment that has `auto-round==0.16.1` as well. With `--model MODEL --into FOLDER` it quantises a model
instead, which `benchmarks.kernels.checkpoints` measures.
"""

from pathlib import Path

MADE = Path(__file__).parent
FORMATS = ("gptq_4_asymmetric", "gptq_8", "awq", "awq_symmetric", "own_gptq", "own_gptqmodel", "own_awq")
LOGITS = "logits.safetensors"
SIZES = {"hidden_size": 64, "intermediate_size": 96}
"""Of the Llama with random weights that was quantised."""
