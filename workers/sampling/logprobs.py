"""Log-probabilities of the model's raw logits, without logits processors or temperature."""

from collections.abc import Sequence as Seq

import torch

from protos.messages import TokenLogprobs

SLICE_ELEMENTS = 1 << 22  # logits processed together, which bounds memory for long prompts


def token_logprobs(logits_MV: torch.Tensor, token_ids: Seq[int], top: int) -> list[TokenLogprobs]:
    """Return one entry per position: the token itself, then the *top* most likely ones, best first.

    Every entry has `1 + top` tokens: the token is repeated if it is among the top ones. Of equally likely tokens the
    lowest id comes first. Ranks are 1 + the number of tokens strictly more likely.

    Args:
        logits_MV: float32, raw; not changed.
        token_ids: the token at each of the M positions.
        top: how many of the most likely tokens; -1 for the whole vocabulary.
    """
    vocab = logits_MV.shape[1]
    count = vocab if top < 0 else min(top, vocab)
    rows = max(1, SLICE_ELEMENTS // vocab)
    entries: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), rows):
        entries += _entries(logits_MV[first : first + rows], token_ids[first : first + rows], count)
    return entries


def _entries(logits_MV: torch.Tensor, token_ids: Seq[int], count: int) -> list[TokenLogprobs]:
    ids_M1 = torch.tensor(token_ids, device=logits_MV.device)[:, None]
    chosen_M1 = logits_MV.gather(1, ids_M1)
    rank_M1 = (logits_MV > chosen_M1).sum(1, keepdim=True) + 1
    total_M1 = logits_MV.logsumexp(1, keepdim=True)
    top_MK, top_ids_MK, top_rank_MK = _top(logits_MV, count)
    ids = torch.cat((ids_M1, top_ids_MK), 1).tolist()
    logprobs = (torch.cat((chosen_M1, top_MK), 1) - total_M1).tolist()
    ranks = torch.cat((rank_M1, top_rank_MK), 1).tolist()
    return [TokenLogprobs(*entry) for entry in zip(ids, logprobs, ranks, strict=True)]


def _top(logits_MV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values, ids and ranks `[M, count]` of the most likely tokens, lowest ids first among equals."""
    if count == 0:
        nothing = torch.empty((len(logits_MV), 0), device=logits_MV.device)
        return nothing, nothing.long(), nothing.long()
    top_MK, ids_MK = logits_MV.topk(count, 1)
    new_MK = torch.ones_like(ids_MK, dtype=torch.bool)
    new_MK[:, 1:] = top_MK[:, 1:] != top_MK[:, :-1]
    columns_K = torch.arange(count, device=logits_MV.device)
    ranks_MK = torch.where(new_MK, columns_K, 0).cummax(1).values + 1
    tied_M = ~new_MK.all(1) | ((logits_MV >= top_MK[:, -1:]).sum(1) > count)
    # Half-precision logits tie often. A stable sort, of those rows only, puts the lowest ids first.
    ids_MK[tied_M] = logits_MV[tied_M].sort(dim=1, descending=True, stable=True).indices[:, :count]
    return top_MK, ids_MK, ranks_MK
