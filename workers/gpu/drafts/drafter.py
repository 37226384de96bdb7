"""Which drafts graphs can run, and the programs that run them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proposers.draft_model import DraftModelProposer
from proposers.shared.autoregressive import AutoregressiveProposer
from proposers.shared.dynamic_tree import TreeShape
from workers.draft.target_cache import TargetCache
from workers.gpu.attention_torch import DeviceAttention, device_attention
from workers.gpu.drafts.chain_loop import ChainLoop, DraftProgram
from workers.gpu.drafts.features import FeatureArea
from workers.gpu.drafts.graphed_models import HeadModel, LanguageModel
from workers.gpu.drafts.protocol import GraphedModel
from workers.gpu.drafts.tree_loop import TreeLoop
from workers.gpu.inputs import RoundInputs
from workers.model.module_runner import ModuleRunner
from workers.model.runner import ModelRunner

if TYPE_CHECKING:
    from workers.draft.engine import DraftEngine


@dataclass(frozen=True)
class Drafter:
    """A draft that graphs can run.

    Attributes:
        engine: of the draft.
        model: what the graphs call.
        attention: over its KV cache.
        shape: of its trees; of chains, if its width is 1.
        area: has the target's features; None for a draft that reads tokens alone.
    """

    engine: "DraftEngine"
    model: GraphedModel
    attention: DeviceAttention
    shape: TreeShape
    area: FeatureArea | None = None

    def program(self, inputs: RoundInputs) -> DraftProgram:
        """Return what drafts for rounds of the size of *inputs*."""
        if self.shape.width > 1:
            return TreeLoop(self.model, inputs, self.shape, self.engine.worker.sampler.vocab_size)
        return ChainLoop(self.model, inputs, self.shape.depth)


def drafter_of(engine: "DraftEngine", most_drafted: int) -> Drafter | None:
    """Return the draft of *engine* for graphs; None if they cannot run it, or if it samples with a noise of its own.

    Args:
        engine: before it serves.
        most_drafted: the most draft tokens of a row.
    """
    proposer, runner, vocab_size = engine.proposer, engine.worker.forward, engine.worker.sampler.vocab_size
    if not isinstance(proposer, DraftModelProposer | AutoregressiveProposer) or _reads_host(engine, proposer.shape):
        return None
    if type(runner) is ModelRunner and runner.kv_window is None and can_capture(runner):
        attention = device_attention(runner.attention, runner.cache)
        return Drafter(engine, LanguageModel(runner, attention, vocab_size), attention, proposer.shape)
    if type(runner) is not ModuleRunner or runner.attention is None:
        return None
    if runner.kv_window is not None or runner.cache.dtype != runner.loaded.dtype:
        return None
    attention, area = device_attention(runner.attention, runner.cache), FeatureArea(engine, 1 + most_drafted)
    return Drafter(engine, HeadModel(runner, attention, area, vocab_size), attention, proposer.shape, area)


def _reads_host(engine: "DraftEngine", shape: TreeShape) -> bool:
    """Whether drafts are sampled or ended, or their cache is kept, by what is on the host."""
    worker = engine.worker
    is_ended = worker.early_stop is not None and shape.width == 1  # it ends chains only
    return worker.draft_sampler is not None or is_ended or isinstance(worker.cache, TargetCache)


def can_capture(runner: ModelRunner) -> bool:
    """Whether graphs can repeat forwards: recurrent layers and caches of another dtype are planned on the host."""
    return not runner.loaded.recurrent and runner.cache.dtype == runner.loaded.dtype
