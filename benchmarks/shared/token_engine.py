"""An `LLM` on token ids, and prompts of token ids: pieces of the held-out files of the standard library."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from demo import corpus
from slipstream import LLM, SamplingParams

Ids = list[int]
Config = dict[str, Any]

MIN_TOKENS, MAX_TOKENS = 16, 192
"""Bounds of a prompt's length."""
GREEDY, SEEDED = "greedy", "seeded"
TEMPERATURES = {GREEDY: 0.0, SEEDED: 1.0}
UNI, RAY = "uni", "ray, T = 2"
CACHE_BYTES = 1 << 30


def prompts(target: Path, count: int) -> list[Ids]:
    """Return *count* pieces of held-out files, of `MIN_TOKENS` to `MAX_TOKENS` tokens, the same in every run."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = list(corpus.read(corpus.split(corpus.stdlib_root())[1]))
    files = [encoded.ids for encoded in tokenizer.encode_batch(texts, add_special_tokens=False)]
    files = [ids for ids in files if len(ids) > MAX_TOKENS]
    rng = random.Random(6)
    found = []
    for _ in range(count):
        ids, length = rng.choice(files), rng.randint(MIN_TOKENS, MAX_TOKENS)
        start = rng.randrange(len(ids) - length)
        found.append(ids[start : start + length])
    return found


class TokenEngine:
    """An `LLM` on token ids."""

    def __init__(
        self,
        target: Path,
        speculative_config: Config | None = None,
        *,
        topology: str = UNI,
        threads: int = 2,
        **options: Any,
    ) -> None:
        if topology == RAY:
            options |= {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
        self.llm = LLM(
            model=str(target),
            speculative_config=speculative_config,
            kv_cache_memory_bytes=CACHE_BYTES,
            num_threads=1 if topology == RAY else threads,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            device="cpu",
            **options,
        )

    def generate(
        self, prompts: Sequence[Ids], seeds: Sequence[int], tokens: int, sampling: str, batch: int
    ) -> list[Ids]:
        """Return the continuations of *prompts*, generated *batch* at a time."""
        outputs: list[Ids] = []
        for at in range(0, len(prompts), batch):
            some = [{"prompt_token_ids": ids} for ids in prompts[at : at + batch]]
            params = [
                SamplingParams(
                    temperature=TEMPERATURES[sampling], seed=seed, max_tokens=tokens, ignore_eos=True, detokenize=False
                )
                for seed in seeds[at : at + batch]
            ]
            outputs += [list(result.outputs[0].token_ids) for result in self.llm.generate(some, params, use_tqdm=False)]
        return outputs
