"""Text a target writes itself, for its draft to learn from: what a draft meets when it serves is not the corpus.

Written by this project's own engine, a third each greedily, at temperature 0.7 and as the model is, behind beginnings
cut from the corpus.
"""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams

NUM_TEXTS, TOKENS = 3072, 384
PROMPT_TOKENS = (16, 160)
STYLES = ((0.0, 1.0), (0.7, 0.9), (1.0, 1.0))  # temperature, top-p


def load_or_write(target: Path, corpus: torch.Tensor, path: Path, count: int | None = None) -> torch.Tensor:
    """Return int32 ids `[N]`: those kept at *path*, or else *count* new texts (`NUM_TEXTS`) of the model in *target*.

    Their beginnings are cut from *corpus*, int32 ids `[M]`.
    """
    if not path.exists():
        save_file({"ids": write(target, corpus, NUM_TEXTS if count is None else count)}, path)
    ids: torch.Tensor = load_file(path)["ids"]
    return ids


def write(target: Path, corpus: torch.Tensor, count: int) -> torch.Tensor:
    """Return *count* texts of `TOKENS` tokens, beginnings included, one after another."""
    llm = LLM(model=str(target), max_num_seqs=64, seed=0)
    prompts = list(beginnings(corpus, count))
    params = [
        SamplingParams(
            max_tokens=TOKENS - len(prompt),
            temperature=temperature,
            top_p=top_p,
            seed=i,
            ignore_eos=True,
            detokenize=False,
        )
        for i, (prompt, (temperature, top_p)) in enumerate(zip(prompts, cycle(STYLES), strict=False))
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    ids = [
        token
        for prompt, output in zip(prompts, outputs, strict=True)
        for token in (*prompt, *output.outputs[0].token_ids)
    ]
    return torch.tensor(ids, dtype=torch.int32)


def beginnings(corpus: torch.Tensor, count: int) -> Iterator[list[int]]:
    """Yield *count* pieces of *corpus*, always the same."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(count):
        length = int(torch.randint(*PROMPT_TOKENS, (1,), generator=generator))
        start = int(torch.randint(len(corpus) - length, (1,), generator=generator))
        yield corpus[start : start + length].tolist()
