"""Which rule judges a round: what `rejection_sample_method` says, and nothing else."""

from protos.config.engine import SpeculativeConfig
from workers.sampling.sampler import Sampler
from workers.verification.acceptance import AcceptanceRule, SampleAndMatch, Synthetic
from workers.verification.rejection import RejectionSampler


def judge_for(speculative: SpeculativeConfig | None, sampler: Sampler) -> AcceptanceRule:
    """Return the judge that *speculative* asks for; sample and match, which is plain sampling, where it is None."""
    if speculative is None or speculative.rejection_sample_method == "coupled":
        return SampleAndMatch(sampler)
    if speculative.rejection_sample_method == "synthetic":
        return Synthetic(sampler, speculative.synthetic_rates)
    return RejectionSampler(sampler, speculative.rejection_sample_method, draws=speculative.samples_drafts)
