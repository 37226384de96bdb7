"""Logits of a target and a draft along the same texts, recorded once, and the acceptance rules applied to them."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.shared.measure import Floats
from benchmarks.shared.workload import Item
from protos.messages import Sampling
from slipstream import LLM, SamplingParams
from workers.sampling.noise import ACCEPT, DRAFT, row_keys, stream_seeds, uniform
from workers.sampling.sample import Ints, SamplingLimits, top_distribution, without_replacement
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.verification import rejection_math as rules
from workers.verification.draft_probs import DRAFT_PROBS_SIZE

SEEDS = 48
"""Draws at each position of a text."""
BRANCHES, TRIALS = 4, 16
"""Chains drawn after each anchor, and acceptance trials of each chain."""
STRIDE = 16
"""Tokens of a text between two anchors."""


@dataclass(frozen=True)
class Text:
    """A prompt and the T tokens that the target sampled after it, `ids` `[L]`; the fp32 logits of those, `[T, V]`."""

    ids: torch.Tensor
    prompt_len: int
    target_TV: torch.Tensor
    draft_TV: torch.Tensor


def continuations(
    target: Path, items: Sequence[Item], temperature: float, tokens: int, threads: int
) -> list[list[int]]:
    """Return the tokens that the target samples after each prompt."""
    with LLM(
        model=str(target),
        speculative_config=None,
        num_threads=threads,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        enforce_eager=True,
    ) as llm:
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True, detokenize=False)
            for i in range(len(items))
        ]
        results = llm.generate([{"prompt_token_ids": list(item.prompt)} for item in items], params, use_tqdm=False)
    return [list(result.outputs[0].token_ids) for result in results]


class Models:
    """Both models, in float32."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.target, self.draft = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (target, draft)
        )

    @torch.inference_mode()
    def record(self, prompt: Sequence[int], output: Sequence[int]) -> Text:
        """Return the logits of both models along a text."""
        ids = torch.tensor([*prompt, *output])
        wanted = slice(len(prompt) - 1, len(ids) - 1)
        target_TV, draft_TV = (
            model(ids[None], use_cache=False).logits[0, wanted] for model in (self.target, self.draft)
        )
        return Text(ids, len(prompt), target_TV, draft_TV)

    @torch.inference_mode()
    def chains(self, text: Text, temperature: float, k: int, seed: int) -> Iterator[rules.ChainBatch]:
        """Yield, for every anchor of a text, `BRANCHES` chains that the draft samples, with all probabilities."""
        caches = [model(text.ids[None], use_cache=True).past_key_values for model in (self.target, self.draft)]
        for end in range(text.prompt_len, len(text.ids) - k, STRIDE):
            before = [_branches(cache, end - 1) for cache in caches]
            seeds_R = np.arange(BRANCHES) + seed
            yield self._grow(
                text.ids[end - 1].expand(BRANCHES),
                before,
                _warm(BRANCHES, temperature),
                k,
                stream_seeds(seeds_R, DRAFT, np.full(BRANCHES, end)),
            )

    def _grow(
        self, last_R: torch.Tensor, before: list[Any], limits: SamplingLimits, k: int, seeds_R: Ints
    ) -> rules.ChainBatch:
        fed, draft_probs, places = [last_R], [], []
        for step in range(k):
            logits_RV = self.draft(fed[-1][:, None], past_key_values=before[1], use_cache=True).logits[:, -1]
            ids_RL, q_RL = top_distribution(logits_RV, limits, DRAFT_PROBS_SIZE)
            keys_R = torch.from_numpy(row_keys(seeds_R, np.full(len(seeds_R), step)))
            drawn_R1 = without_replacement(ids_RL, q_RL, keys_R, 1)
            fed.append(drawn_R1[:, 0])
            draft_probs.append((ids_RL, q_RL))
            places.append((ids_RL == drawn_R1).int().argmax(1))
        logits_RKV = self.target(torch.stack(fed[:-1], 1), past_key_values=before[0], use_cache=True).logits
        p_RKV = _probabilities(logits_RKV, limits)
        ids_RKL, q_RKL = (torch.stack(parts, 1) for parts in zip(*draft_probs, strict=True))
        return rules.ChainBatch(
            np.full(len(seeds_R), k),
            p_RKV.gather(2, ids_RKL).numpy(),
            q_RKL.double().numpy(),
            torch.stack(places, 1).numpy(),
        )


def _branches(cache: Any, length: int) -> Any:
    """Return a copy of a model's KV cache, cut to *length* tokens, once for each branch."""
    copy = deepcopy(cache)
    copy.crop(length - copy.get_seq_length())
    copy.batch_repeat_interleave(BRANCHES)
    return copy


def _warm(rows: int, temperature: float) -> SamplingLimits:
    return SamplingLimits(
        np.full(rows, temperature, np.float32), np.zeros(rows, np.int64), np.ones(rows), np.zeros(rows)
    )


def _probabilities(logits_XV: torch.Tensor, limits: SamplingLimits) -> torch.Tensor:
    return (logits_XV.double() / float(limits.temperature[0])).softmax(-1)


def mean_accepted(chains: rules.ChainBatch, rule: str, seed: int) -> float:
    """Return how many tokens of a chain a rule accepts, averaged over `TRIALS` trials of each chain."""
    many = rules.ChainBatch(*(np.repeat(part, TRIALS, 0) for part in chains))  # type: ignore[arg-type]
    rows, k = many.drawn_RK.shape
    u_RK = uniform(stream_seeds(np.arange(rows), ACCEPT, np.full(rows, seed))[:, None], np.arange(k))
    accepted = rules.standard(many, u_RK) if rule == "standard" else rules.block(many, u_RK)
    return float(accepted.counts_R.mean())


class Draws:
    """Samples at every position of texts, with the noise of `SEEDS` seeds and the engine's samplers.

    Args:
        vocab: number of tokens.
        temperature: of all.
    """

    def __init__(self, vocab: int, temperature: float) -> None:
        self.temperature = temperature
        slots = SlotTable(SEEDS, 8, 8)
        slots.sampling = [Sampling(seed=seed, temperature=temperature) for seed in range(SEEDS)]
        slots.generation[:] = 1
        self._sampler, self._limits = Sampler(slots, vocab), _warm(SEEDS, temperature)
        self._slots_N: Ints = np.arange(SEEDS)

    def coupled(self, text: Text, first: int) -> tuple[Floats, Floats]:
        """Return how often the draft's token, and one of its best two, equals the target's, `[T]` each.

        Args:
            text: recorded.
            first: the index of its first token, different for every text, so that no noise is used twice.
        """
        found = [
            self._match(p_V, q_V, first + t)
            for t, (p_V, q_V) in enumerate(zip(text.target_TV, text.draft_TV, strict=True))
        ]
        one_T, two_T = np.array(found).T
        return one_T, two_T

    def _match(self, target_V: torch.Tensor, draft_V: torch.Tensor, index: int) -> tuple[float, float]:
        index_N = np.full(SEEDS, index)
        y_N = self._sampler.sample(target_V.expand(SEEDS, -1), self._slots_N, index_N)
        d_N = self._sampler.sample(draft_V.expand(SEEDS, -1), self._slots_N, index_N)
        two_N2, _ = self._sampler.candidates(draft_V.expand(SEEDS, -1), self._slots_N, index_N, 2)
        return float((y_N == d_N).double().mean()), float((two_N2 == y_N[:, None]).any(1).double().mean())

    def standard(self, text: Text, first: int) -> Floats:
        """Return how often `standard` accepts a token sampled from the draft's distribution, `[T]`. As `coupled`."""
        return np.array(
            [
                self._accepted(p_V, q_V, first + t)
                for t, (p_V, q_V) in enumerate(zip(text.target_TV, text.draft_TV, strict=True))
            ]
        )

    def _accepted(self, target_V: torch.Tensor, draft_V: torch.Tensor, index: int) -> float:
        ids_NL, q_NL = top_distribution(draft_V.expand(SEEDS, -1), self._limits, DRAFT_PROBS_SIZE)
        known_N = np.full(SEEDS, index)
        keys = torch.from_numpy(row_keys(stream_seeds(self._slots_N, DRAFT, known_N), known_N))
        place_N1 = (ids_NL == without_replacement(ids_NL, q_NL, keys, 1)).int().argmax(1, keepdim=True)
        p_NL = _probabilities(target_V, self._limits)[ids_NL]
        chains = rules.ChainBatch(
            np.ones(SEEDS, np.int64), p_NL[:, None].numpy(), q_NL.double()[:, None].numpy(), place_N1.numpy()
        )
        u_N1 = uniform(stream_seeds(self._slots_N, ACCEPT, known_N), known_N)[:, None]
        return float(rules.standard(chains, u_N1).counts_R.mean())


def match_probability(p_TV: Floats, q_TV: Floats) -> Floats:
    """Return sum_i 1 / sum_j max(p_j/p_i, q_j/q_i), `[T]`: how often two samples with the same noise agree.

    With tokens in descending order of p/q, the maximum is p_j/p_i up to i and q_j/q_i after it (arXiv 2408.07978).
    """
    order_TV = np.argsort(-(np.log(p_TV) - np.log(q_TV)), axis=1)
    p_TV, q_TV = np.take_along_axis(p_TV, order_TV, 1), np.take_along_axis(q_TV, order_TV, 1)
    after_TV = np.maximum(0.0, 1.0 - q_TV.cumsum(1))
    found_T: Floats = (1.0 / (p_TV.cumsum(1) / p_TV + after_TV / q_TV)).sum(1)
    return found_T
