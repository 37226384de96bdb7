"""Whether a check saw enough speculation: draft tokens must have been proposed, accepted and rejected."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from cluster.check.answers import Answer, DraftCounts
from cluster.check.distribution import LEAST_DRAWS, DistributionVerdict


def missing_outcomes(with_speculation: DraftCounts, without: DraftCounts) -> tuple[str, ...]:
    """Return a line for each outcome that did not occur: draft tokens proposed, accepted and rejected."""
    checks = (
        (with_speculation.proposed == 0, "nothing was drafted: is speculation on, and does the draft work?"),
        (
            with_speculation.proposed > 0 and with_speculation.accepted == 0,
            "no draft token was accepted: the draft does not fit the target, or there are too few prompts",
        ),
        (
            with_speculation.proposed > 0 and with_speculation.rejected == 0,
            "no draft token was rejected: a draft that is always right shows little; give more prompts, or a "
            "lesser draft",
        ),
        (without.proposed > 0, f"the engine without speculation scored {without.proposed} draft tokens"),
    )
    return tuple(text for is_missing, text in checks if is_missing)


def parts_without_acceptance(parts: Mapping[str, Seq[Answer]]) -> tuple[str, ...]:
    """Return a line for each of *parts* whose answers hold no accepted draft token."""
    return tuple(
        f"no draft token was accepted in the {name} answers: did a batch-size limit turn speculation off?"
        for name, answers in parts.items()
        if not any("accepted" in answer.origins for answer in answers)
    )


def untested_samples(distribution: DistributionVerdict, *, has_seeded: bool) -> tuple[str, ...]:
    """Return a line if sampled tokens are checked by distribution only, and no test holds enough drafted ones."""
    if has_seeded or any(test.freedom and test.drafted >= LEAST_DRAWS for test in distribution.tests):
        return ()
    return ("no prefix has enough tokens from rounds with a draft: take more --samples",)
