"""Whether speculation leaves the answers alone: what `slipstream check` runs on two engines, one after the other.

(a) The same prompts with and without speculation, greedy and seeded: the same tokens, but for shown floating-point
ties. (b) Many seeds behind a few prompts with speculation: the tokens have the target's own law, wherever they stand in
a round. (c) Each difference explained by what the target without speculation says at that position. And something was
really guessed, accepted and rejected, or nothing of this means anything.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from cluster.check import distribution
from cluster.check import identity as checking_identity
from cluster.check.answers import Answer, Place
from cluster.check.distribution import LEAST_DRAWS, DistributionVerdict
from cluster.check.engine_run import Counts, EngineRun, Ids, RunJob, Tick
from cluster.check.identity import ALLOWANCES, NONE_ALLOWED, Allowance, Asked, IdentityVerdict, Part
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from protos.seeds import mix_seed

LAW_PROMPTS = 4
LEAST_LAW_TOKENS, MOST_LAW_TOKENS, BEYOND = 8, 16, 4  # sampled behind a prompt: K + 4, within these
COUPLED = "coupled"
LOOKAHEAD = "lookahead"  # learns from what the target would say at positions ahead

Bars = Callable[[str, int], AbstractContextManager[Tick]]
"""Makes a progress bar of a text and a number of ticks."""


@dataclass(frozen=True)
class CheckOptions:
    """What is to be checked on.

    Attributes:
        prompts: text, token ids, or dictionaries of either; at least one.
        max_tokens: of each answer that is compared.
        samples: answers sampled behind each of the first `LAW_PROMPTS` prompts.
        temperature: of seeded answers and samples.
        seed: all seeds are made of this one.
        false_alarm: the chance that (b) finds something where nothing is wrong.
    """

    prompts: Seq[Any]
    max_tokens: int = 64
    samples: int = 1000
    temperature: float = 1.0
    seed: int = 0
    false_alarm: float = 1e-6

    @property
    def law_prompts(self) -> int:
        """How many prompts are sampled behind."""
        return min(LAW_PROMPTS, len(self.prompts))

    def setting(self, law_tokens: int) -> "Setting":
        """Return this as it is reported."""
        return Setting(
            len(self.prompts), self.max_tokens, self.law_prompts, self.samples, law_tokens, self.temperature, self.seed
        )


class Setting(msgspec.Struct, frozen=True):
    """How large a check was. `law_prompts` prompts were sampled behind, `law_tokens` tokens `samples` times each."""

    prompts: int
    max_tokens: int
    law_prompts: int
    samples: int
    law_tokens: int
    temperature: float
    seed: int


class Report(msgspec.Struct, frozen=True):
    """What was found.

    Attributes:
        dtype: what the target computes in.
        rule: `rejection_sample_method`.
        batch_invariant: whether no ties are allowed, because the engine promises the same bits.
        allowance: what counts as a tie.
        setting: how much was done.
        with_speculation, without: draft tokens of the two engines.
        missing: what did not happen, so that the check means little; empty where nothing is.
        greedy, seeded: identity; None where the rule does not promise that of sampled answers.
        law: of what is sampled with speculation.
    """

    dtype: str
    rule: str
    batch_invariant: bool
    allowance: Allowance
    setting: Setting
    with_speculation: Counts
    without: Counts
    missing: tuple[str, ...]
    greedy: IdentityVerdict
    seeded: IdentityVerdict | None
    law: DistributionVerdict

    @property
    def passed(self) -> bool:
        """Whether speculation ran and changed nothing."""
        identical = self.greedy.passed and (self.seeded is None or self.seeded.passed)
        return identical and self.law.passed and not self.missing


def rule_of(config: EngineConfig) -> str:
    """Return the acceptance rule that *config* asks for; refuses what cannot be checked.

    Raises:
        ConfigError: nothing speculates, or the rule changes answers on purpose.
    """
    if config.speculative is None:
        raise ConfigError(
            "there is nothing to check: speculative_config asks for no speculation; give one, such as "
            '\'{"method": "ngram", "num_speculative_tokens": 5}\''
        )
    rule = str(config.speculative.rejection_sample_method)
    if rule == "synthetic":
        raise ConfigError(
            "rejection_sample_method 'synthetic' changes answers on purpose, for load tests: there is "
            "nothing to check; use coupled, standard or block"
        )
    return rule


def speculating(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """Return *config* so that it guesses at every batch size, unless the user said when not to."""
    if speculative.disable_by_batch_size is None and speculative.num_speculative_tokens_per_batch_size is None:
        speculative = replace(speculative, disable_by_batch_size=config.scheduler.max_num_seqs)
    return replace(config, speculative=speculative)


@dataclass(frozen=True)
class _Material:
    """What the engine with speculation said: *answers* to *asked*, and *sampled* ones with their prompts' numbers.

    *by_place* says whether the ways in which positions of these were reached may be told apart.
    """

    dtype: str
    asked: Seq[Asked]
    answers: Seq[Answer]
    encoded: Seq[Ids]
    sampled: Seq[tuple[int, Answer]]
    counts: Counts
    by_place: bool

    @property
    def parts(self) -> dict[str, list[Answer]]:
        """All answers, by what they are for."""
        found: dict[str, list[Answer]] = {}
        for each, answer in zip(self.asked, self.answers, strict=True):
            found.setdefault(each.part, []).append(answer)
        return {**found, "sampled": [answer for _, answer in self.sampled]}


def examine(config: EngineConfig, wanted: CheckOptions, say: ProgressCallback, bars: Bars) -> Report:
    """Run both engines, one after the other, and judge.

    Raises:
        ConfigError: see `rule_of`; other errors as engines raise them.
    """
    rule, speculative, invariant = rule_of(config), config.speculative, config.model.batch_invariant
    assert speculative is not None
    law_tokens = min(MOST_LAW_TOKENS, max(LEAST_LAW_TOKENS, speculative.num_speculative_tokens + BEYOND))
    say("check: the engine with speculation")
    with EngineRun(speculating(config, speculative), say) as side:
        material = _material(side, wanted, speculative, law_tokens, bars)
    say("check: the engine without speculation")
    with EngineRun(replace(config, speculative=None), say) as side:
        allowance = NONE_ALLOWED if invariant else ALLOWANCES.get(side.dtype, ALLOWANCES["float32"])
        identity = _identity(side, wanted, material, allowance, bars)
        law = _law(side, wanted, material, allowance, bars)
        without = side.counts
    seeded = identity.get("seeded")
    lacks = missing(material.counts, without)
    lacks = lacks or (*unshown(material.parts), *untested(law, has_seeded=seeded is not None))
    return Report(
        material.dtype,
        rule,
        invariant,
        allowance,
        wanted.setting(law_tokens),
        material.counts,
        without,
        lacks,
        identity["greedy"],
        seeded,
        law,
    )


def untested(law: DistributionVerdict, *, has_seeded: bool) -> tuple[str, ...]:
    """Return what is missing where the law alone can tell of sampled tokens: a test of some that were guessed at."""
    if has_seeded or any(test.freedom and test.drafted >= LEAST_DRAWS for test in law.tests):
        return ()
    return ("no prefix has enough tokens that were guessed at: take more --samples",)


def unshown(parts: Mapping[str, Seq[Answer]]) -> tuple[str, ...]:
    """Return which *parts* have no accepted guess among their answers, so that they prove nothing of speculation."""
    return tuple(
        f"no guess was accepted in the {name} answers: was speculation off there, by a batch size say?"
        for name, answers in parts.items()
        if not any("guess" in answer.origins for answer in answers)
    )


def missing(with_speculation: Counts, without: Counts) -> tuple[str, ...]:
    """Return what did not happen, so that identical answers prove little."""
    lacks = (
        (with_speculation.proposed == 0, "nothing was guessed: is speculation on, and does the draft work?"),
        (
            with_speculation.proposed > 0 and with_speculation.accepted == 0,
            "no guess was accepted: the draft knows nothing of the target's text, or prompts are too few",
        ),
        (
            with_speculation.proposed > 0 and with_speculation.rejected == 0,
            "no guess was rejected: a draft that is always right shows little; give more prompts, or a lesser draft",
        ),
        (without.proposed > 0, f"the engine without speculation scored {without.proposed} guesses"),
    )
    return tuple(text for is_so, text in lacks if is_so)


# With speculation.


def _material(
    side: EngineRun, wanted: CheckOptions, speculative: SpeculativeConfig, law_tokens: int, bars: Bars
) -> _Material:
    encoded = side.encode(wanted.prompts, SamplingParams(max_tokens=wanted.max_tokens))
    asked = _asked(encoded, wanted, str(speculative.rejection_sample_method))
    answers = _answers(side, asked, wanted.max_tokens, bars, "with speculation")
    samples = [
        _sample(encoded, wanted, prompt, number)
        for prompt in range(wanted.law_prompts)
        for number in range(wanted.samples)
    ]
    sampled = _answers(side, samples, law_tokens, bars, "sampling with speculation")
    pairs = [(each.prompt, answer) for each, answer in zip(samples, sampled, strict=True)]
    by_place = LOOKAHEAD not in speculative.methods
    return _Material(side.dtype, asked, answers, encoded, pairs, side.counts, by_place)


def _asked(encoded: Seq[Ids], wanted: CheckOptions, rule: str) -> list[Asked]:
    """Return a greedy sequence of each prompt, and a seeded one where that is promised to be the same."""
    greedy = [Asked("greedy", i, ids, 0.0, 0) for i, ids in enumerate(encoded)]
    if rule != COUPLED:
        return greedy
    seeded = [Asked("seeded", i, ids, wanted.temperature, mix_seed(wanted.seed, i)) for i, ids in enumerate(encoded)]
    return greedy + seeded


def _sample(encoded: Seq[Ids], wanted: CheckOptions, prompt: int, number: int) -> Asked:
    """Return a sequence whose seed is nobody else's."""
    seed = mix_seed(wanted.seed, len(encoded) + prompt * wanted.samples + number)
    return Asked("seeded", prompt, encoded[prompt], wanted.temperature, seed)


def _answers(side: EngineRun, asked: Seq[Asked], max_tokens: int, bars: Bars, text: str) -> list[Answer]:
    jobs = [
        RunJob(
            each.token_ids,
            SamplingParams(
                temperature=each.temperature, seed=each.seed, max_tokens=max_tokens, ignore_eos=True, detokenize=False
            ),
        )
        for each in asked
    ]
    with bars(text, len(jobs)) as tick:
        return side.answers(jobs, tick)


# Without.


def _identity(
    side: EngineRun, wanted: CheckOptions, material: _Material, allowance: Allowance, bars: Bars
) -> dict[Part, IdentityVerdict]:
    """Compare part by part, and have each difference explained."""
    asked, ours = material.asked, material.answers
    theirs = _answers(side, asked, wanted.max_tokens, bars, "without speculation")
    apart = checking_identity.differences(asked, ours, theirs)
    with bars("explaining differences", len(apart)) as tick:
        laws = side.laws([each.context for each in apart], tick)
        findings = [checking_identity.explain(each, law_V, allowance) for each, law_V in zip(apart, laws, strict=True)]
    verdicts: dict[Part, IdentityVerdict] = {}
    for part in dict.fromkeys(each.part for each in asked):
        answers = [answer for each, answer in zip(asked, ours, strict=True) if each.part == part]
        verdicts[part] = checking_identity.judge(part, answers, [f for f in findings if f.part == part], allowance)
    return verdicts


def _law(
    side: EngineRun, wanted: CheckOptions, material: _Material, allowance: Allowance, bars: Bars
) -> DistributionVerdict:
    groups = distribution.grouped(material.sampled, by_place=material.by_place)
    tokens: Counter[Place] = Counter()
    for group in groups:
        tokens[group.place] += group.draws
    tested = distribution.worth_testing(groups)
    contexts = [(*material.encoded[group.prompt], *group.prefix) for group in tested]
    tolerance = allowance.tolerance_at(wanted.temperature)
    with bars("asking for laws", len(contexts)) as tick:
        told = side.laws(contexts, tick)
        laws = (distribution.tempered(logprobs_V, wanted.temperature) for logprobs_V in told)
        return distribution.judge(tested, laws, wanted.false_alarm, tolerance, tokens)
