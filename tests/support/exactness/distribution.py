"""The distribution of the next token by definition, with transformers' processors where there are any."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
import transformers

from protos.messages import Sampling

Probs = npt.NDArray[np.float64]


def distribution(sampling: Sampling, raw_V: Probs, output: Seq[int], prompt: Seq[int]) -> Probs:
    """Return the distribution after *prompt* and *output*, float64 `[V]`, from the model's logits *raw_V*."""
    scores = masked(sampling, raw_V.astype(np.float64), output)
    for i, bias in (sampling.logit_bias or {}).items():
        scores[i] += bias
    ids, values = torch.tensor([[*prompt, *output]]), torch.from_numpy(scores)[None]
    if sampling.repetition_penalty != 1.0:
        values = transformers.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(ids, values)
    counts = torch.bincount(torch.tensor(list(output), dtype=torch.int64), minlength=len(raw_V))
    values = values - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
    if sampling.temperature == 0.0:
        return np.eye(len(raw_V))[int(values[0].argmax())]
    for processor in processors(sampling):
        values = processor(ids, values)
    return values[0].softmax(0).numpy()


def _ids(packed: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(packed) for bit in range(8) if byte >> bit & 1}


def masked(sampling: Sampling, scores: Probs, output: Seq[int]) -> Probs:
    """Return *scores* with -inf for tokens that word lists and the minimum length forbid."""
    gone = [word[-1] for word in sampling.bad_words if len(word) == 1 or tuple(output[-(len(word) - 1) :]) == word[:-1]]
    gone += sampling.stop_ids if len(output) < sampling.min_tokens else ()
    if sampling.allowed_ids is not None:
        gone += set(range(len(scores))) - _ids(sampling.allowed_ids)
    scores[gone] = -np.inf
    return scores


def processors(sampling: Sampling) -> Iterator[transformers.LogitsProcessor]:
    """Yield temperature and limits, in vLLM's order."""
    yield transformers.TemperatureLogitsWarper(sampling.temperature)
    if sampling.min_p:
        yield transformers.MinPLogitsWarper(sampling.min_p)
    if sampling.top_k:
        yield transformers.TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1.0:
        yield transformers.TopPLogitsWarper(sampling.top_p)
