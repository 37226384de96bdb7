"""Measures how many draft tokens of a head match the target's greedy continuations of held-out texts."""

from functools import partial

import torch

from demo.heads import Head, Lesson, Teacher

NUM_TEXTS, PROMPT_TOKENS, TOKENS = 16, 96, 192


@torch.no_grad()
def continuations(teacher: Teacher, ids_N: torch.Tensor) -> torch.Tensor:
    """Return `[B, L]`: pieces of *ids_N*, evenly spread, with the target's greedy continuations."""
    starts = torch.linspace(0, len(ids_N) - PROMPT_TOKENS - 1, NUM_TEXTS).long().tolist()
    prompts_BL = torch.stack([ids_N[start : start + PROMPT_TOKENS].long() for start in starts])
    where = next(teacher.model.parameters()).device
    written: torch.Tensor = teacher.model.generate(
        prompts_BL.to(where),
        attention_mask=torch.ones_like(prompts_BL).to(where),
        do_sample=False,
        min_new_tokens=TOKENS - PROMPT_TOKENS,
        max_new_tokens=TOKENS - PROMPT_TOKENS,
    )
    return written


@torch.no_grad()
def agreement(teacher: Teacher, head: Head, texts_BL: torch.Tensor) -> list[float]:
    """Return, for each token of a greedy draft, the share of drafts that match up to it; last their sum."""
    first, last = PROMPT_TOKENS - 2, texts_BL.shape[1] - head.depth - 1
    anchors_BM = torch.arange(first, last, device=texts_BL.device).expand(len(texts_BL), -1)
    lesson = teacher.teach(texts_BL, anchors_BM)
    right = torch.ones_like(anchors_BM, dtype=torch.bool)
    shares = []
    for i, drafted_BM in enumerate(free_running(head, lesson)):
        right = right & (drafted_BM == lesson.tokens(2 + i))
        shares.append(right.float().mean().item())
    return [*shares, sum(shares)]


def free_running(head: Head, lesson: Lesson) -> list[torch.Tensor]:
    """Return the ids `[B, M]` of each greedy draft token; the head reads those before it."""
    follow = partial(head.best, lesson)
    return [follow(i, states) for i, states in enumerate(head.states(lesson, follow))]
