"""Logits processors against transformers' processors and the formulas."""

import numpy as np
import torch
import transformers

from protos.messages import Sampling
from runtime.text.token_options import pack_ids
from tests.support.sampling import VOCAB, draw, logits, table
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable


def test_options_naming_ids_the_logits_lack() -> None:
    sampling = Sampling(
        seed=1,
        logit_bias={70: 5.0},
        bad_words=((71,), (1, 72)),
        allowed_ids=pack_ids((3, 73)),
        min_tokens=3,
        stop_ids=(74,),
        repetition_penalty=1.2,
    )
    assert draw(table(sampling, prompts=[[80, 1]], outputs=[[90]]), logits(1)) == [3]


def test_penalties_as_transformers_and_the_formula() -> None:
    prompt, output, values = [3, 4, 4], [5, 5, 3, 9], logits(1)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    repeated = processor(torch.tensor([prompt + output]), values.clone())
    counts = torch.bincount(torch.tensor(output), minlength=VOCAB)
    expected = repeated - 0.4 * counts - 0.9 * (counts > 0)
    sampling = Sampling(seed=1, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=0.9)
    assert torch.allclose(edited(sampling, values, prompt, output), expected, atol=1e-6)


def test_bias_masks_and_minimum_length() -> None:
    sampling = Sampling(
        seed=1, logit_bias={3: -2.0, 8: 1.5}, bad_words=((5,), (6, 7), (6, 6, 9)), min_tokens=3, stop_ids=(10, 11)
    )
    values = logits(1)
    expected = values.clone()
    expected[0, 3] -= 2.0
    expected[0, 8] += 1.5
    expected[0, [5, 7]] = -torch.inf
    early = expected.clone()
    early[0, [10, 11]] = -torch.inf
    assert torch.equal(edited(sampling, values, [6, 6], [6]), early)  # the prompt's 6 does not count
    assert torch.equal(edited(sampling, values, [1], [1, 1, 6]), expected)
    expected[0, 9] = -torch.inf
    assert torch.equal(edited(sampling, values, [1], [1, 6, 6]), expected)


def test_allowed_ids() -> None:
    found = edited(Sampling(seed=1, allowed_ids=pack_ids((2, 30))), logits(1), [1], [])
    assert found[0].isfinite().nonzero()[:, 0].tolist() == [2, 30]


def test_drafted_tokens_count_like_committed_ones_and_are_forgotten_again() -> None:
    sampling = Sampling(
        seed=1, presence_penalty=1.0, repetition_penalty=1.2, bad_words=((6, 7),), min_tokens=4, stop_ids=(1,)
    )
    slots = table(sampling, prompts=[[1, 2]], outputs=[[3]])
    edits = Sampler(slots, VOCAB)
    for draft in ([6, 5], [8, 6], [3, 3, 6]):
        slots.write_draft(0, draft)
        for known in range(len(draft) + 1):
            found = edit_with(edits, logits(1), slots, 3 + known)
            assert torch.equal(found, edited(sampling, logits(1), [1, 2], [3, *draft[:known]]))


def test_a_slot_given_to_another_sequence_starts_afresh() -> None:
    old, new = (
        Sampling(seed=1, repetition_penalty=1.5, allowed_ids=pack_ids((3, 4))),
        Sampling(seed=9, presence_penalty=2.0),
    )
    slots = table(old, prompts=[[1, 2]], outputs=[[3, 3]])
    sampler = Sampler(slots, VOCAB)
    sampler.sample(logits(1), np.array([0]), np.array([4]))
    slots.tokens[0, :3], slots.known_len[0], slots.prompt_len[0] = [5, 6, 7], 3, 2
    slots.sampling[0] = new
    slots.generation[0] += 1
    fresh = table(new, prompts=[[5, 6]], outputs=[[7]])
    for values in logits(30, seed=3)[:, None]:
        assert sampler.sample(values, np.array([0]), np.array([3])).tolist() == draw(fresh, values)


def edited(sampling: Sampling, values: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    slots = table(sampling, prompts=[prompt], outputs=[output])
    return edit_with(Sampler(slots, VOCAB), values, slots, len(prompt) + len(output))


def edit_with(sampler: Sampler, values: torch.Tensor, slots: SlotTable, index: int) -> torch.Tensor:
    rows, seen = np.array([0]), []
    sampler._sample = lambda values, *_: seen.append(values) or torch.zeros(1, dtype=torch.int64)  # type: ignore[method-assign]
    sampler.sample(values, rows, np.array([index]))
    return seen[0]
