"""Checks that speculation does not change the answers: `slipstream check` runs two engines, one after the other.

(a) The same prompts with and without speculation, greedy and seeded, must give the same tokens, except after
floating-point ties. (b) Tokens sampled with speculation, by many seeds after a few prompts, must follow the target's
distribution at every kind of position. (c) Each difference is explained by the target's log-probabilities there. The
check passes only if draft tokens were proposed, accepted and rejected.
"""

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from cluster.check import distribution, identity
from cluster.check.answers import Answer, DraftCounts, Place
from cluster.check.coverage import missing_outcomes, parts_without_acceptance, untested_samples
from cluster.check.distribution import DistributionVerdict
from cluster.check.engine_run import EngineRun, Ids, RunJob, Tick
from cluster.check.identity import ALLOWANCES, NO_TIES, Allowance, ComparedRequest, IdentityVerdict, Part
from cluster.check.report import Report, Setting
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams
from protos.seeds import mix_seed

SAMPLED_PROMPTS = 4
MIN_SAMPLED_TOKENS, MAX_SAMPLED_TOKENS, EXTRA_TOKENS = 8, 16, 4
"""Tokens sampled after a prompt: K + `EXTRA_TOKENS`, within these limits."""
COUPLED = "coupled"
LOOKAHEAD = "lookahead"
"""A method whose proposals depend on the target's choices at later positions."""

ProgressBars = Callable[[str, int], AbstractContextManager[Tick]]
"""Makes a progress bar from a text and a number of ticks."""


@dataclass(frozen=True)
class CheckOptions:
    """What to check.

    Attributes:
        prompts: text, token ids, or dictionaries of either; at least one.
        max_tokens: length of each compared answer.
        samples: answers sampled after each of the first `SAMPLED_PROMPTS` prompts.
        temperature: of seeded answers and samples.
        seed: all seeds are derived from it.
        false_alarm: the probability that (b) fails although nothing is wrong.
    """

    prompts: Seq[Any]
    max_tokens: int = 64
    samples: int = 1000
    temperature: float = 1.0
    seed: int = 0
    false_alarm: float = 1e-6

    @property
    def sampled_prompts(self) -> int:
        """Number of prompts with samples."""
        return min(SAMPLED_PROMPTS, len(self.prompts))

    def setting(self, sampled_tokens: int) -> Setting:
        """Return the part of the options that is reported."""
        return Setting(
            len(self.prompts),
            self.max_tokens,
            self.sampled_prompts,
            self.samples,
            sampled_tokens,
            self.temperature,
            self.seed,
        )


def rule_of(config: EngineConfig) -> str:
    """Return the acceptance rule of *config*.

    Raises:
        ConfigError: speculation is off, or the rule changes answers on purpose.
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


def at_every_batch_size(config: EngineConfig, speculative: SpeculativeConfig) -> EngineConfig:
    """Return *config* with draft tokens in every step, unless the user chose a policy, a threshold or a table."""
    if speculative.policy is None and speculative.policy_name == "adaptive":
        speculative = replace(speculative, policy="fixed")
    return replace(config, speculative=speculative)


@dataclass(frozen=True)
class _SpeculativeAnswers:
    """What the engine with speculation answered.

    *answers* belong to *requests*; *sampled* are pairs of a prompt's number and an answer. *by_place* is False if
    positions must not be grouped by what they follow.
    """

    dtype: str
    requests: Seq[ComparedRequest]
    answers: Seq[Answer]
    encoded: Seq[Ids]
    sampled: Seq[tuple[int, Answer]]
    counts: DraftCounts
    by_place: bool

    @property
    def parts(self) -> dict[str, list[Answer]]:
        """All answers by part: "greedy", "seeded", "sampled"."""
        found: dict[str, list[Answer]] = {}
        for request, answer in zip(self.requests, self.answers, strict=True):
            found.setdefault(request.part, []).append(answer)
        return {**found, "sampled": [answer for _, answer in self.sampled]}


def examine(config: EngineConfig, options: CheckOptions, report: ProgressCallback, bars: ProgressBars) -> Report:
    """Run the engine with speculation, then the one without, and compare.

    Raises:
        ConfigError: see `rule_of`. Engines raise other errors.
    """
    rule, speculative, invariant = rule_of(config), config.speculative, config.model.batch_invariant
    assert speculative is not None
    sampled_tokens = speculative.num_speculative_tokens + EXTRA_TOKENS
    sampled_tokens = min(MAX_SAMPLED_TOKENS, max(MIN_SAMPLED_TOKENS, sampled_tokens))
    report("check: the engine with speculation")
    with EngineRun(at_every_batch_size(config, speculative), report) as run:
        found = _speculate(run, options, speculative, sampled_tokens, bars)
    report("check: the engine without speculation")
    with EngineRun(replace(config, speculative=None), report) as run:
        allowance = NO_TIES if invariant else ALLOWANCES.get(run.dtype, ALLOWANCES["float32"])
        identities = _check_identity(run, options, found, allowance, bars)
        sampling = _check_distribution(run, options, found, allowance, bars)
        without = run.counts
    seeded = identities.get("seeded")
    missing = missing_outcomes(found.counts, without) or (
        *parts_without_acceptance(found.parts),
        *untested_samples(sampling, has_seeded=seeded is not None),
    )
    return Report(
        found.dtype,
        rule,
        invariant,
        allowance,
        options.setting(sampled_tokens),
        found.counts,
        without,
        missing,
        identities["greedy"],
        seeded,
        sampling,
    )


# With speculation.


def _speculate(
    run: EngineRun, options: CheckOptions, speculative: SpeculativeConfig, sampled_tokens: int, bars: ProgressBars
) -> _SpeculativeAnswers:
    encoded = run.encode(options.prompts, SamplingParams(max_tokens=options.max_tokens))
    requests = _compared_requests(encoded, options, str(speculative.rejection_sample_method))
    answers = _answers(run, requests, options.max_tokens, bars, "with speculation")
    samples = [
        _sample(encoded, options, prompt, number)
        for prompt in range(options.sampled_prompts)
        for number in range(options.samples)
    ]
    sampled = _answers(run, samples, sampled_tokens, bars, "sampling with speculation")
    pairs = [(each.prompt, answer) for each, answer in zip(samples, sampled, strict=True)]
    by_place = LOOKAHEAD not in speculative.methods
    return _SpeculativeAnswers(run.dtype, requests, answers, encoded, pairs, run.counts, by_place)


def _compared_requests(encoded: Seq[Ids], options: CheckOptions, rule: str) -> list[ComparedRequest]:
    """Return a greedy request for each prompt, and a seeded one if the rule promises the same tokens."""
    greedy = [ComparedRequest("greedy", i, ids, 0.0, 0) for i, ids in enumerate(encoded)]
    if rule != COUPLED:
        return greedy
    return greedy + [
        ComparedRequest("seeded", i, ids, options.temperature, mix_seed(options.seed, i))
        for i, ids in enumerate(encoded)
    ]


def _sample(encoded: Seq[Ids], options: CheckOptions, prompt: int, number: int) -> ComparedRequest:
    """Return a request with a seed of its own."""
    seed = mix_seed(options.seed, len(encoded) + prompt * options.samples + number)
    return ComparedRequest("seeded", prompt, encoded[prompt], options.temperature, seed)


def _answers(
    run: EngineRun, requests: Seq[ComparedRequest], max_tokens: int, bars: ProgressBars, text: str
) -> list[Answer]:
    common = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    jobs = [RunJob(each.token_ids, replace(common, temperature=each.temperature, seed=each.seed)) for each in requests]
    with bars(text, len(jobs)) as tick:
        return run.answers(jobs, tick)


# Without speculation.


def _check_identity(
    run: EngineRun, options: CheckOptions, found: _SpeculativeAnswers, allowance: Allowance, bars: ProgressBars
) -> dict[Part, IdentityVerdict]:
    """Compare the answers part by part, and explain each difference."""
    requests = found.requests
    without = _answers(run, requests, options.max_tokens, bars, "without speculation")
    differences = identity.differences(requests, found.answers, without)
    with bars("explaining differences", len(differences)) as tick:
        logprobs = run.next_logprobs([each.context for each in differences], tick)
        findings = [identity.explain(*each, allowance) for each in zip(differences, logprobs, strict=True)]
    verdicts: dict[Part, IdentityVerdict] = {}
    for part in dict.fromkeys(each.part for each in requests):
        answers = [answer for each, answer in zip(requests, found.answers, strict=True) if each.part == part]
        verdicts[part] = identity.verdict_of(part, answers, [f for f in findings if f.part == part], allowance)
    return verdicts


def _check_distribution(
    run: EngineRun, options: CheckOptions, found: _SpeculativeAnswers, allowance: Allowance, bars: ProgressBars
) -> DistributionVerdict:
    groups = distribution.group_samples(found.sampled, by_place=found.by_place)
    tokens: Counter[Place] = Counter()
    for group in groups:
        tokens[group.place] += group.draws
    tested = distribution.select_groups(groups)
    contexts = [(*found.encoded[group.prompt], *group.prefix) for group in tested]
    tolerance = allowance.tolerance_at(options.temperature)
    with bars("computing distributions", len(contexts)) as tick:
        logprobs = run.next_logprobs(contexts, tick)
        probs = (distribution.probs_at(logprobs_V, options.temperature) for logprobs_V in logprobs)
        return distribution.verdict_of(tested, probs, options.false_alarm, tolerance, tokens)
