"""Losses of the demo's models."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

SHARP = 0.7  # temperature at which total variation is taken

Loss = Callable[[torch.Tensor], torch.Tensor]
"""Of ids `[B, L]`, int64."""


def next_token_loss(model: nn.Module) -> Loss:
    """Return the loss of plain language modelling over ids `[B, L]`."""
    compiled = torch.compile(model)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        logits = compiled(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    return loss


def distillation_loss(draft: nn.Module, target: nn.Module) -> Loss:
    """Return the mean `divergence` per position of a draft from its target, over ids `[B, L]`."""
    target.eval().requires_grad_(False)
    student, teacher, apart = torch.compile(draft), torch.compile(target), torch.compile(divergence)

    def loss(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(input_ids=ids, use_cache=False).logits
        drafted = student(input_ids=ids, use_cache=False).logits
        return apart(drafted.flatten(0, 1), wanted.flatten(0, 1))

    return loss


def divergence(draft_NV: torch.Tensor, wanted_NV: torch.Tensor) -> torch.Tensor:
    """Return KL(wanted || draft) + their total variation at `SHARP`, as a mean over rows of logits.

    KL covers the whole distribution; total variation is the share of draft tokens that optimal acceptance rejects, at a
    lower temperature so that the most likely tokens count most.
    """
    draft, wanted = draft_NV.float(), wanted_NV.float()
    kl = F.kl_div(F.log_softmax(draft, -1), F.log_softmax(wanted, -1), reduction="batchmean", log_target=True)
    apart = (F.softmax(draft / SHARP, -1) - F.softmax(wanted / SHARP, -1)).abs().sum(-1).mean() / 2
    return kl + apart
