"""Makes the policy that a configuration names."""

from functools import partial

from proposers import registry
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.messages import StepCosts
from runtime.policy.acceptance import Sources
from runtime.policy.adaptive import AdaptivePolicy
from runtime.policy.bandit import BanditPolicy
from runtime.policy.base import NoSpeculation, Policy
from runtime.policy.batch_size import BatchSizePolicy, with_threshold
from runtime.policy.choosers import ChainChooser, TreeChooser
from runtime.policy.exploration import LookUp
from runtime.policy.round_costs import RoundCostModel
from runtime.policy.stopping import StoppingPolicy


def make_policy(config: EngineConfig, costs: StepCosts | None, look_up: LookUp | None = None) -> tuple[Policy, str]:
    """Return the policy for *config*, and a line that describes it.

    Args:
        config: a parsed configuration.
        costs: of steps, measured in warm-up; None if they were not.
        look_up: looks up drafts in the controller process; None if no method does.

    Raises:
        ConfigError: the table of batch sizes is not valid.
    """
    speculative = config.speculative
    if speculative is None:
        return NoSpeculation(), "speculation: not configured"
    policy, line = _policy(config, speculative, costs, look_up)
    if speculative.assistant_confidence_threshold != "auto":
        return policy, line
    return StoppingPolicy(policy, _cost_model(config, speculative, costs)), f"{line}; drafts end where that pays"


def _policy(
    config: EngineConfig, speculative: SpeculativeConfig, costs: StepCosts | None, look_up: LookUp | None
) -> tuple[Policy, str]:
    if speculative.policy_name == "adaptive":
        policy = _adaptive(config, speculative, costs, look_up)
        return policy, "speculation: as many draft tokens as pay, by measured costs"
    if speculative.policy_name == "bandit":
        bandit = BanditPolicy(speculative.num_speculative_tokens, may_branch=speculative.may_branch)
        return bandit, "speculation: as many draft tokens as were fastest, none included"
    if speculative.policy_name == "fixed":
        return BatchSizePolicy(speculative), "speculation: on at every batch size, as configured"
    derive = partial(with_threshold, speculative, max_rows=config.scheduler.max_num_seqs)
    with_limit, line = derive(costs)
    return BatchSizePolicy(with_limit, derive, costs), line


def _adaptive(
    config: EngineConfig, speculative: SpeculativeConfig, costs: StepCosts | None, look_up: LookUp | None
) -> Policy:
    limit, sources = speculative.num_speculative_tokens, _sources(speculative)
    chooser = TreeChooser(limit, sources) if speculative.may_branch else ChainChooser(limit, sources)
    model = _cost_model(config, speculative, costs)
    return AdaptivePolicy(limit, chooser, model, sources=sources, may_branch=speculative.may_branch, look_up=look_up)


def _sources(speculative: SpeculativeConfig) -> Sources:
    return Sources(speculative.methods, registry.worker_method(speculative) is not None)


def _cost_model(config: EngineConfig, speculative: SpeculativeConfig, costs: StepCosts | None) -> RoundCostModel:
    limit, max_rows = speculative.num_speculative_tokens, config.scheduler.max_num_seqs
    max_tokens = min(config.scheduler.max_num_batched_tokens, max_rows * (limit + 1))
    return RoundCostModel(costs, max_tokens, max_rows, limit, _sources(speculative))
