"""From which batch size on guessing costs more than it gives, by the step costs measured in warm-up.

A plain step of b rows costs t(b) and gives b tokens. With K guesses a row it costs K d(b) + t(b (K + 1)) and gives
b (1 + a + ... + a^K) tokens, where a is the share of guesses accepted one by one (Leviathan et al. 2023).
"""

from bisect import bisect_left

from protos.messages import StepCosts

ASSUMED_ACCEPTANCE = 0.7
"""What a trained draft of the same family reaches as a rule; the true share is known only while serving."""


def derive(costs: StepCosts, num_guesses: int, max_rows: int) -> int | None:
    """Return the largest batch size up to which guessing pays, None where it pays up to *max_rows*.

    At least 1: whoever asks for speculation gets it for a single request.
    """
    for rows in range(2, max_rows + 1):
        if gain(costs, num_guesses, rows) < 1.0:
            return rows - 1
    return None


def gain(costs: StepCosts, num_guesses: int, rows: int, acceptance: float = ASSUMED_ACCEPTANCE) -> float:
    """Return how many times faster *rows* decoding rows go with guesses than without."""
    tokens = sum(acceptance**i for i in range(num_guesses + 1))
    drafting = num_guesses * at(costs.draft_s, rows) if costs.draft_s else 0.0
    return tokens * at(costs.target_s, rows) / (drafting + at(costs.target_s, rows * (num_guesses + 1)))


def at(seconds: dict[int, float], tokens: int) -> float:
    """Return the seconds for *tokens*: between measured sizes on a straight line, beyond the last in proportion."""
    sizes = sorted(seconds)
    above = bisect_left(sizes, tokens)
    if above == len(sizes):
        return seconds[sizes[-1]] * tokens / sizes[-1]
    if above == 0 or sizes[above] == tokens:
        return seconds[sizes[above]]
    low, high = sizes[above - 1], sizes[above]
    share = (tokens - low) / (high - low)
    return seconds[low] * (1 - share) + seconds[high] * share
