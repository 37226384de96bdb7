"""Chooses the acceptance rule of the configuration's `rejection_sample_method`."""

from protos.config.engine import SpeculativeConfig
from workers.sampling.sampler import Sampler
from workers.verification.acceptance import AcceptanceRule, SampleAndMatch, Synthetic
from workers.verification.rejection import RejectionSampler


def make_acceptance_rule(speculative: SpeculativeConfig | None, sampler: Sampler) -> AcceptanceRule:
    """Return the rule of *speculative*; if that is None, `SampleAndMatch`, which without drafts is plain sampling."""
    if speculative is None or speculative.rejection_sample_method == "coupled":
        return SampleAndMatch(sampler)
    if speculative.rejection_sample_method == "synthetic":
        return Synthetic(sampler, speculative.synthetic_rates)
    return RejectionSampler(sampler, speculative.rejection_sample_method, samples_drafts=speculative.samples_drafts)
