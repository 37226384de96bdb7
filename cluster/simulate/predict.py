"""Predicts the speed-up of replayed drafts from what rounds cost.

A round of b rows without draft tokens takes t(b, 1) seconds and gives b tokens. With drafts of up to K tokens, a round
takes t(b, 1 + p) + d(b, K), where p is the mean number of draft tokens of its rows, and gives b times the tokens that a
step gave in the replay. The rows are independent steps of the replay: t is averaged over the distribution of p, because
one more token may cost much and the next ones little. An answer takes its share of such rounds, and what its prompt
adds to them. The speed-up is the ratio of the seconds of the replayed answers.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import numpy.typing as npt

from cluster.simulate.costs import CostTable, Shape, draft_key
from cluster.simulate.results import Replay


@dataclass(frozen=True)
class SpeedupPrediction:
    """The speed-up of a draft with *k* tokens, for batches of `shape[0]` rows of `shape[1]` known tokens.

    Attributes:
        plain_s, round_s: seconds of a round without and with drafts.
        prompt_s, draft_prompt_s: what the prompt of an answer adds without drafts, and what drafting adds to that.
        speedup: tokens per second relative to no speculation, prompts included.
    """

    name: str
    k: int
    shape: Shape
    plain_s: float
    round_s: float
    speedup: float
    prompt_s: float = 0.0
    draft_prompt_s: float = 0.0


def predict(replay: Replay, costs: CostTable) -> list[SpeedupPrediction]:
    """Return the speed-up of *replay* for each measured shape. Raises `ConfigError` for costs that are not there."""
    proposed_P = np.bincount([step.proposed for answer in replay.answers for step in answer.steps]) / replay.num_steps
    key, num_steps = draft_key(replay.speculative), replay.num_steps / len(replay.answers)
    prompt_s = fmean(costs.prompt_s(answer.num_prompt_tokens) for answer in replay.answers)
    draft_prompt_s = fmean(costs.draft_prompt_s(key, answer.num_prompt_tokens) for answer in replay.answers)
    found = []
    for shape in costs.shapes:
        plain_s = costs.plain_s(shape)
        round_s = _target_s(costs, shape, proposed_P) + costs.draft_s(key, shape, replay.k)
        plain_answer_s = prompt_s + num_steps * replay.tokens_per_step * plain_s / shape[0]
        answer_s = prompt_s + draft_prompt_s + num_steps * round_s / shape[0]
        found.append(
            SpeedupPrediction(
                replay.name, replay.k, shape, plain_s, round_s, plain_answer_s / answer_s, prompt_s, draft_prompt_s
            )
        )
    return found


def _target_s(costs: CostTable, shape: Shape, proposed_P: npt.NDArray[np.float64]) -> float:
    """Return the mean seconds of the target, where each row has p draft tokens with probability `proposed_P[p]`."""
    rows, total_P = shape[0], np.ones(1)
    for _ in range(rows):
        total_P = np.convolve(total_P, proposed_P)
    return sum(float(share) * costs.target_s(shape, 1 + total / rows) for total, share in enumerate(total_P) if share)


def best_by_shape(predictions: Seq[SpeedupPrediction]) -> dict[tuple[str, Shape], SpeedupPrediction]:
    """Return the K with the highest speed-up, for each draft and shape."""
    best: dict[tuple[str, Shape], SpeedupPrediction] = {}
    for each in predictions:
        before = best.get((each.name, each.shape))
        if before is None or each.speedup > before.speedup:
            best[each.name, each.shape] = each
    return best


def threshold(predictions: Seq[SpeedupPrediction], name: str, context: int) -> str:
    """Return up to which of the measured batch sizes the draft *name* pays, at its best K."""
    best = best_by_shape([each for each in predictions if each.name == name and each.shape[1] == context])
    by_rows = {shape[0]: each.speedup for (_, shape), each in sorted(best.items())}
    losing = [rows for rows, speedup in by_rows.items() if speedup <= 1]
    paying = [rows for rows in by_rows if not losing or rows < losing[0]]
    if not paying:
        return f"does not pay at batch size {min(by_rows)}, the smallest measured"
    if not losing:
        return f"pays at every measured batch size, up to {max(by_rows)}"
    return f"pays up to batch size {paying[-1]}, not at {losing[0]}"
