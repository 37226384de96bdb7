"""Comparison of greedy outputs with those of `transformers`, up to near ties."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from slipstream import LLM, SamplingParams
from tests.support.policies import always

TIE_GAP = 1e-4
MAX_TIES_PER_THOUSAND = 2

CROWDED: dict[str, int] = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 5,
    "block_size": 4,
    "num_gpu_blocks_override": 44,
    "max_model_len": 160,
}
"""Options of an engine that chunks prompts of 20 tokens and more, and preempts some of a dozen requests."""


@dataclass(frozen=True)
class Run:
    """Token ids of each prompt's continuation, and counts of draft tokens."""

    outputs: list[list[int]]
    proposed: int
    accepted: int
    preemptions: int = 0

    def assert_speculated(self) -> None:
        """Check that some draft tokens were accepted and some rejected."""
        assert self.proposed > self.accepted > 0, (self.proposed, self.accepted)


def generate(
    model: Path,
    prompts: Seq[Seq[int]],
    params: SamplingParams | list[SamplingParams],
    **arguments: object,
) -> Run:
    """Run *prompts* (token ids) through a new engine, all at once."""
    arguments = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "speculative_config": None,
        **arguments,
    }
    arguments["speculative_config"] = always(arguments["speculative_config"])
    with LLM(model=str(model), **arguments) as llm:
        return collect(llm, prompts, params)


def collect(llm: LLM, prompts: Seq[Seq[int]], params: SamplingParams | list[SamplingParams]) -> Run:
    """Run *prompts* on an existing engine."""
    before = llm.stats()
    results = llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)
    after = llm.stats()
    return Run(
        outputs=[list(result.outputs[0].token_ids) for result in results],
        proposed=after.proposed - before.proposed,
        accepted=after.accepted - before.accepted,
        preemptions=after.preemptions - before.preemptions,
    )


def perturbed(model: Path, out: Path, scale: float = 0.02) -> Path:
    """Save a copy of *model* with noise of *scale* standard deviations on its weights: a draft that is often right."""
    copy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in copy.parameters():
            spread = weight.std() if weight.numel() > 1 else weight.abs()
            weight.add_(torch.randn(weight.shape, generator=generator) * spread * scale)
    copy.save_pretrained(out)
    return out


class Reference:
    """`transformers` itself, one sequence at a time in fp32."""

    def __init__(self, model: Path) -> None:
        # Eager: in transformers 5.17 gemma2 runs SDPA by default, which leaves out its soft cap.
        self.model = AutoModelForCausalLM.from_pretrained(
            model,
            dtype=torch.float32,
            attn_implementation="eager",
        ).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Seq[int], count: int) -> list[int]:
        """Return *count* tokens of greedy `generate`, end tokens ignored."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def top2_gap(self, tokens: Seq[int]) -> float:
        """Return the distance of the two largest logits after *tokens*."""
        top = self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].float().topk(2).values
        return float(top[0] - top[1])


def assert_identical(
    prompts: Seq[Seq[int]],
    ours: Seq[Seq[int]],
    theirs: Seq[Seq[int]],
    reference: Reference,
) -> None:
    """Check for equal ids, except after a near tie in at most 2 of 1,000 sequences (one sequence always may)."""
    ties = 0
    for prompt, got, wanted in zip(prompts, ours, theirs, strict=True):
        if list(got) == list(wanted):
            continue
        at = next((i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b), None)
        assert at is not None, f"one output ends early: {len(got)} and {len(wanted)} tokens"
        gap = reference.top2_gap([*prompt, *wanted[:at]])
        assert gap < TIE_GAP, f"outputs differ at token {at}: {got[at]} and {wanted[at]}, top-2 gap {gap:.2e}"
        ties += 1
        print(f"tie at token {at}: gap {gap:.2e}")
    assert ties <= max(1, len(prompts) * MAX_TIES_PER_THOUSAND / 1000)
