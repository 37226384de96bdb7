"""Tiny quantised checkpoints in the formats of DeepSeek, FBGEMM, ModelOpt and gpt-oss, quantised by published code.

| folder | quantised by | read by |
|---|---|---|
| `fp8_blocks` | `transformers` 5.23.0, `Fp8Quantize`: DeepSeek's and Qwen's fp8 in blocks | its `Fp8Dequantize` |
| `fp8_blocks_ue8m0` | the same, scales are powers of two (DeepSeek-V3.1) | the same |
| `fbgemm` | `fbgemm-gpu-genai` 1.9.0, `quantize_fp8_row` | the product with the scales that it returns |
| `model_opt` | `nvidia-modelopt` 0.47.0, `export_hf_checkpoint`, whole | its `FP8QTensor` |
| `gpt_oss` | `nvidia-modelopt` 0.47.0, `MXFP4QTensor` | `gpt-oss` 0.0.9, the reader that OpenAI published |

Each folder has `config.json`, `model.safetensors` and `logits.safetensors`: token ids `[1, N]`, and the logits
`[1, N, V]` of `transformers` in float64 with the weights that the reader gives. They were made by

    python -m tests.support.checkpoints.publishers.make

in an environment that has these packages as well. With `--model MODEL --into FOLDER` it quantises a model instead, but
for gpt-oss' format, which is one of experts; `benchmarks.kernels.checkpoints` measures those.
"""

from pathlib import Path

MADE = Path(__file__).parent
FORMATS = ("fp8_blocks", "fp8_blocks_ue8m0", "fbgemm", "model_opt", "gpt_oss")
