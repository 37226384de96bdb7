"""Which drafts graphs can run, and the programs that run them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from proposers.draft_model import DraftModelProposer
from proposers.shared.dynamic_tree import TreeShape
from workers.draft.target_cache import TargetCache
from workers.gpu.attention_torch import DeviceAttention, device_attention
from workers.gpu.drafts.chain_loop import ChainLoop, DraftProgram
from workers.gpu.drafts.graphed_models import GraphedModel, LanguageModel
from workers.gpu.drafts.tree_loop import TreeLoop
from workers.gpu.inputs import RoundInputs
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
    """

    engine: "DraftEngine"
    model: GraphedModel
    attention: DeviceAttention
    shape: TreeShape

    def program(self, inputs: RoundInputs) -> DraftProgram:
        """Return what drafts for rounds of the size of *inputs*."""
        if self.shape.width > 1:
            return TreeLoop(self.model, inputs, self.shape, self.engine.worker.sampler.vocab_size)
        return ChainLoop(self.model, inputs)


def drafter_of(engine: "DraftEngine") -> Drafter | None:
    """Return the draft of *engine* for graphs; None if they cannot run it, or if it samples with a noise of its own."""
    worker, proposer, runner = engine.worker, engine.proposer, engine.worker.forward
    if worker.draft_sampler is not None or isinstance(worker.cache, TargetCache):
        return None
    if not isinstance(proposer, DraftModelProposer) or type(runner) is not ModelRunner:
        return None
    if worker.early_stop is not None and proposer.shape.width == 1:  # it ends chains only
        return None
    if runner.kv_window is not None or not can_capture(runner):
        return None
    attention = device_attention(runner.attention, runner.cache)
    return Drafter(engine, LanguageModel(runner, attention, worker.sampler.vocab_size), attention, proposer.shape)


def can_capture(runner: ModelRunner) -> bool:
    """Whether graphs can repeat forwards: recurrent layers and caches of another dtype are planned on the host."""
    return not runner.loaded.recurrent and runner.cache.dtype == runner.loaded.dtype
