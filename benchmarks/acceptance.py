"""How many draft tokens each acceptance rule accepts, on the demo pair, compared with theory.

    python -m benchmarks.acceptance [--limit 32] [--output figures.json]

The target samples texts after the workload's prompts. The logits of target and draft are recorded along them; then the
engine's own samplers and acceptance rules run at every position. All rules see the same texts and are compared text by
text: intervals are bootstrap 95 % intervals of the mean over texts. Rates per token are the probability that a single
draft token is accepted after the recorded text. For chains of K, the draft samples its own tokens after every 16th
token, and the target scores them.

Claims, at every temperature; the exit status is 1 if one fails:
- coupled is within 1 % of its formula, sum_i 1 / sum_j max(p_j/p_i, q_j/q_i);
- coupled accepts at least as much as with a greedy draft, from temperature 0.7 up;
- coupled accepts at most 15 % less than standard, and than sum min(p, q), which standard would accept with all
  probabilities of the draft instead of those of its 64 most likely tokens;
- block accepts at least as much of a chain as standard: the interval of the difference does not reach below 0;
- two coupled candidates include the target's token at least as often as standard accepts its single one: likewise.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.shared import measure, workload
from benchmarks.shared.measure import Floats, Ratio
from benchmarks.shared.recorded import Draws, Models, Text, continuations, match_probability, mean_accepted
from demo import pair

TEMPERATURES = (0.3, 0.7, 1.0, 1.3)
TOKENS = 64
GREEDY_FROM = 0.7
FORMULA_TOLERANCE, STANDARD_ALLOWANCE = 0.01, 0.15


@dataclass(frozen=True)
class Sample:
    """What was accepted on one text: rates per token for each rule, and tokens accepted of a chain of K."""

    formula: float
    coupled: float
    two_coupled: float
    greedy: float
    standard: float
    optimal: float
    standard_chain: float
    block_chain: float


@dataclass(frozen=True)
class AcceptanceRow:
    """One temperature: means over texts, and differences text by text."""

    temperature: float
    means: Sample
    coupled_over_formula: Ratio
    coupled_less_greedy: Ratio
    coupled_by_standard: float
    coupled_by_optimal: float
    block_less_standard: Ratio
    two_less_standard: Ratio

    @classmethod
    def of(cls, temperature: float, samples: Sequence[Sample]) -> "AcceptanceRow":
        """Average over the texts of one temperature."""
        columns = {name: np.array([getattr(sample, name) for sample in samples]) for name in asdict(samples[0])}

        def less(one: str, other: str) -> Ratio:
            return measure.mean(columns[one] - columns[other])

        means = Sample(**{name: float(values.mean()) for name, values in columns.items()})
        return cls(
            temperature,
            means,
            measure.mean(columns["coupled"] / means.formula - columns["formula"] / means.formula + 1),
            less("coupled", "greedy"),
            means.coupled / means.standard,
            means.coupled / means.optimal,
            less("block_chain", "standard_chain"),
            less("two_coupled", "standard"),
        )

    def failures(self) -> list[str]:
        """Return the claims that do not hold."""
        claims = {
            "coupled is within 1 % of its formula": abs(self.coupled_over_formula.value - 1) <= FORMULA_TOLERANCE,
            "coupled accepts at least as much as with a greedy draft": self.temperature < GREEDY_FROM
            or self.coupled_less_greedy.low >= 0,
            "coupled accepts at most 15 % less than standard": self.coupled_by_standard >= 1 - STANDARD_ALLOWANCE,
            "coupled accepts at most 15 % less than sum min(p, q)": self.coupled_by_optimal >= 1 - STANDARD_ALLOWANCE,
            "block accepts at least as much as standard": self.block_less_standard.low >= 0,
            "two coupled candidates accept at least as much as standard": self.two_less_standard.low >= 0,
        }
        return [f"temperature {self.temperature}: {claim}" for claim, holds in claims.items() if not holds]

    def __str__(self) -> str:
        m = self.means
        cells = (
            self.temperature, f"{m.coupled:.3f}", f"{m.formula:.3f}", self.coupled_over_formula, f"{m.greedy:.3f}",
            f"{m.standard:.3f}", f"{m.optimal:.3f}", f"{self.coupled_by_standard:.3f}",
            f"{self.coupled_by_optimal:.3f}", f"{m.two_coupled:.3f}", self.two_less_standard,
            f"{m.standard_chain:.3f}", f"{m.block_chain:.3f}", self.block_less_standard,
        )  # fmt: skip
        return f"| {' | '.join(map(str, cells))} |"


TITLE = (
    "| T | coupled | formula | coupled / formula | greedy draft | standard | sum min(p, q) | coupled / standard | "
    "coupled / sum min(p, q) | two coupled | two - standard | standard, K | block, K | block - standard |\n"
    + "|---" * 14
    + "|"
)


def measured(models: Models, text: Text, draws: Draws, k: int, number: int) -> Sample:
    """Return what every rule accepts on one text, the *number*-th."""
    temperature = draws.temperature
    p_TV, q_TV = (_probabilities(logits_TV, temperature) for logits_TV in (text.target_TV, text.draft_TV))
    first = 1 + number * TOKENS
    coupled_T, two_T = draws.coupled(text, first)
    chains = list(models.chains(text, temperature, k, number * TOKENS))
    accepted = {
        rule: float(np.mean([mean_accepted(chain, rule, number * TOKENS + i) for i, chain in enumerate(chains)]))
        for rule in ("standard", "block")
    }
    return Sample(
        formula=float(match_probability(p_TV, q_TV).mean()),
        coupled=float(coupled_T.mean()),
        two_coupled=float(two_T.mean()),
        greedy=float(p_TV[np.arange(len(p_TV)), q_TV.argmax(1)].mean()),
        standard=float(draws.standard(text, first).mean()),
        optimal=float(np.minimum(p_TV, q_TV).sum(1).mean()),
        standard_chain=accepted["standard"],
        block_chain=accepted["block"],
    )


def _probabilities(logits_TV: torch.Tensor, temperature: float) -> Floats:
    found: Floats = (logits_TV.double() / temperature).softmax(1).numpy()
    return found


def lines(target: Path, draft: Path, args: argparse.Namespace) -> list[AcceptanceRow]:
    """Measure and print every temperature."""
    items, models, found = workload.load(target, args.limit).single, Models(target, draft), []
    print(TITLE)
    for temperature in TEMPERATURES:
        outputs = continuations(target, items, temperature, TOKENS, args.threads)
        texts = [models.record(item.prompt, tokens) for item, tokens in zip(items, outputs, strict=True)]
        draws = Draws(texts[0].target_TV.shape[1], temperature)
        samples = [
            measured(models, text, draws, args.num_speculative_tokens, number) for number, text in enumerate(texts)
        ]
        found.append(AcceptanceRow.of(temperature, samples))
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.set_defaults(limit=32, num_speculative_tokens=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = lines(args.model or pair()[0], args.draft or pair()[1], args)
    failures = [failure for line in found for failure in line.failures()]
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            "texts": args.limit,
            "tokens": TOKENS,
            "num_speculative_tokens": args.num_speculative_tokens,
            "lines": [asdict(line) for line in found],
            "failures": failures,
        },
    )
    if failures:
        raise SystemExit("\n".join(["claims that do not hold:", *failures]))


if __name__ == "__main__":
    main()
