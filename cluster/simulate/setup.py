"""Builds the engine that replays a log: an ordinary one, whose target samples what the log says."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster import assemble
from cluster.assemble import Assembled
from cluster.simulate.logs import LoggedAnswer
from cluster.simulate.odds import COUPLED
from cluster.simulate.requests import end_of_log
from proposers import registry
from protos.config.engine import GROWN, EngineConfig, SpeculativeConfig
from protos.errors import ConfigError, SlipstreamError
from protos.progress import ProgressCallback
from protos.sampling import SamplingParams

UNSHIFTED: Mapping[str, Any] = {
    name: getattr(SamplingParams(), name)
    for name in (
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "min_tokens",
    )
}
"""Parameters by which the target's distribution is not that of its raw logits, unless they have these values."""
OF_THE_TARGET = frozenset({"lookahead"})
"""Methods whose draft tokens are the target's own."""

OF_THE_POLICY = ("policy", "disable_by_batch_size", "num_speculative_tokens_per_batch_size")
"""Keys that say when a draft gets fewer tokens than it could: not in a replay."""


def build(config: EngineConfig, report: ProgressCallback, *, with_target: bool) -> Assembled:
    """Return an engine for requests with `RecordedSampling`; *with_target* loads and runs the target, too.

    Raises:
        ConfigError: the method needs the target, or the acceptance rule or the executor cannot be replayed.
        ModelError: a checkpoint cannot be loaded.
    """
    from cluster.simulate import executors  # noqa: PLC0415 - torch loads when an engine is built, not before

    speculative = _replayable(config)
    why = None if with_target else _why_target(config)
    if why is not None:
        raise ConfigError(f"{why}: give --target, which loads and runs it")
    executors.free_memory()
    make = executors.with_target if with_target else executors.without_target
    return assemble.build(replace(config, speculative=speculative), None, report, make, end_of_log)


def _replayable(config: EngineConfig) -> SpeculativeConfig:
    """Return the speculation of *config* with drafts in every round."""
    speculative = config.speculative
    if speculative is None:
        raise ConfigError("there is nothing to replay: a draft must name a method or a model, got null")
    if speculative.rejection_sample_method == "synthetic":
        raise ConfigError("rejection_sample_method 'synthetic' accepts at given rates: there is nothing to replay")
    if config.parallel.executor != "uni":
        raise ConfigError("a replay runs in one process: leave out tensor_parallel_size and the executor")
    return in_every_round(speculative)


def in_every_round(speculative: SpeculativeConfig) -> SpeculativeConfig:
    """Return *speculative* with as many draft tokens in every round."""
    return replace(speculative, policy="fixed", disable_by_batch_size=None, num_speculative_tokens_per_batch_size=None)


def needs_target(config: EngineConfig) -> bool:
    """Whether the draft of *config* cannot be made without the target."""
    return _why_target(config) is not None


def _why_target(config: EngineConfig) -> str | None:
    """Return why the draft of *config* needs the target; None if it does not."""
    from cluster.simulate.executors import needs_of  # noqa: PLC0415 - as above

    methods = () if config.speculative is None else config.speculative.methods
    own = sorted(OF_THE_TARGET.intersection(methods))
    if own:
        return f"method {own[0]!r} drafts with the target"
    if needs_of(config) != "none":
        return f"method {methods[-1]!r} reads hidden states of the target, which no log has"
    return None


def is_learned(speculative: SpeculativeConfig) -> bool:
    """Whether a model drafts: others draft the same tokens whatever the temperature."""
    return registry.worker_method(speculative) is not None


def has_odds(answer: LoggedAnswer, speculative: SpeculativeConfig) -> bool:
    """Whether the odds of drafts for *answer* are computed from its logged probabilities.

    Not where the draft's noise is known, nor where a draft's next token or the target's distribution depends on more
    than temperature and limits.
    """
    if not answer.params.temperature or answer.logprobs is None or speculative.may_branch:
        return False
    if any(getattr(answer.params, name) != default for name, default in UNSHIFTED.items()):
        return False
    if not is_learned(speculative):
        return True
    if speculative.assistant_confidence_threshold is not None or GROWN.isdisjoint(speculative.methods):
        return False
    if speculative.rejection_sample_method == COUPLED:
        return answer.seed is None
    return speculative.rejection_sample_method == "standard" and draws_drafts(speculative)


def draw_by_odds(assembled: Assembled) -> None:
    """Let the draft, if a model drafts, draft the logged tokens of requests with odds."""
    from cluster.simulate.executors import draft_logged_tokens  # noqa: PLC0415 - as above

    speculative = assembled.config.speculative
    assert speculative is not None, "checked by `build`"
    draft_logged_tokens(assembled.executor, speculative.rejection_sample_method)


def draws_drafts(speculative: SpeculativeConfig) -> bool:
    """Whether draft tokens of requests with a temperature are drawn with noise of their own, which no log has."""
    return speculative.samples_drafts and is_learned(speculative)


def check_drafts(assembled: Assembled) -> None:
    """Raise `SlipstreamError` if a proposer failed: that costs an engine draft tokens, but would falsify a replay."""
    from cluster.simulate.executors import draft_failure  # noqa: PLC0415 - as above

    failure = draft_failure(assembled.executor)
    if failure is not None or assembled.controller.stats().draft_failures:
        reason = "" if failure is None else f" ({type(failure).__name__}: {failure})"
        raise SlipstreamError(f"the draft failed{reason}; its messages have the details")
