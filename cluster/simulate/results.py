"""What a replay found."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cluster.simulate.odds import ExpectedAcceptance
from protos.config.engine import SpeculativeConfig
from protos.messages import SpeculationStats, Step
from protos.outputs import SpeculativeDecodingMetrics, total


@dataclass(frozen=True)
class ReplayedAnswer:
    """What a draft did for one answer.

    Attributes:
        dataset: index of the log.
        steps: of the target, in order; each gave one token more than it accepted, but for the end of the answer.
        stats: as the engine counts them.
        num_output_tokens: of the logged answer.
        expected: by the logged probabilities of the target; None where they were not used.
        num_prompt_tokens: of its prompt.
    """

    dataset: int
    steps: Seq[Step]
    stats: SpeculationStats
    num_output_tokens: int
    expected: ExpectedAcceptance | None = None
    num_prompt_tokens: int = 0

    @property
    def matched(self) -> list[int]:
        """Draft tokens matched so far, after every step."""
        so_far, found = 0, []
        for step in self.steps:
            so_far += step.accepted
            found.append(so_far)
        return found


@dataclass(frozen=True)
class Replay:
    """A draft of at most *k* tokens, replayed. `rules` says how acceptance was found, by number of answers."""

    name: str
    k: int
    speculative: SpeculativeConfig
    answers: Seq[ReplayedAnswer]
    rules: dict[str, int]

    @property
    def stats(self) -> SpeculationStats:
        """Of all answers."""
        return total(answer.stats for answer in self.answers)

    @property
    def metrics(self) -> SpeculativeDecodingMetrics:
        """Of all answers, as an engine reports them: over the steps that had a draft."""
        return SpeculativeDecodingMetrics.of(self.stats)

    @property
    def expected(self) -> ExpectedAcceptance | None:
        """Of all answers whose acceptance is known as an expectation; None without any."""
        parts = [answer.expected for answer in self.answers if answer.expected is not None]
        return ExpectedAcceptance.total(parts) if parts else None

    @property
    def num_steps(self) -> int:
        """Steps of the target, with and without a draft."""
        return sum(len(answer.steps) for answer in self.answers)

    @property
    def tokens_per_step(self) -> float:
        """Logged tokens of a step of the target, steps without a draft included.

        Not one more than what was accepted: where an answer ends with a draft token, no token follows it.
        """
        return sum(answer.num_output_tokens for answer in self.answers) / self.num_steps
