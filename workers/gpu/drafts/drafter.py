"""Which drafts graphs can run, and the programs that run them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from proposers import registry
from proposers.draft_model import DraftModelProposer
from proposers.shared.autoregressive import AutoregressiveProposer
from proposers.shared.dynamic_tree import TreeShape
from proposers.shared.heads import Heads, HeadsProposer
from workers.draft.target_cache import TargetCache
from workers.gpu.attention_torch import DeviceAttention, device_attention
from workers.gpu.drafts.beams_loop import BeamsLoop
from workers.gpu.drafts.chain_loop import ChainLoop, DraftProgram
from workers.gpu.drafts.draft_steps import DraftSteps
from workers.gpu.drafts.features import FeatureArea, NewestFeatures
from workers.gpu.drafts.graphed_models import GraphedHeads, HeadModel, LanguageModel
from workers.gpu.drafts.heads_loop import HeadsChain, HeadsTree
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
        attention: over its KV cache; None if it has none.
        shape: of its trees; of chains, if its width is 1.
        program: returns what drafts for rounds of the size of an input.
        area: has the target's features; None for a draft that reads tokens alone.
    """

    engine: "DraftEngine"
    attention: DeviceAttention | None
    shape: TreeShape
    program: Callable[[RoundInputs], DraftProgram]
    area: FeatureArea | None = None


def drafter_of(engine: "DraftEngine", most_drafted: int) -> Drafter | None:
    """Return the draft of *engine* for graphs; None if they cannot run it, or if it samples with a noise of its own.

    Args:
        engine: before it serves.
        most_drafted: the most draft tokens of a row.
    """
    proposer, runner, vocab_size = engine.proposer, engine.worker.forward, engine.worker.sampler.vocab_size
    if isinstance(proposer, HeadsProposer):
        return _of_heads(engine, proposer, most_drafted)
    if not isinstance(proposer, DraftModelProposer | AutoregressiveProposer) or _reads_host(engine, proposer.shape):
        return None
    if type(runner) is ModelRunner and runner.kv_window is None and can_capture(runner):
        attention = device_attention(runner.attention, runner.cache)
        return _growing(engine, LanguageModel(runner, attention, vocab_size), attention, proposer.shape, None)
    if type(runner) is not ModuleRunner or runner.attention is None or not _can_capture_module(runner):
        return None
    attention, area = device_attention(runner.attention, runner.cache), FeatureArea(engine, 1 + most_drafted)
    return _growing(engine, HeadModel(runner, attention, area, vocab_size), attention, proposer.shape, area)


def _growing(
    engine: "DraftEngine",
    model: GraphedModel,
    attention: DeviceAttention,
    shape: TreeShape,
    area: FeatureArea | None,
) -> Drafter:
    """Return the drafter of a model that is fed its draft tokens."""
    vocab_size = engine.worker.sampler.vocab_size

    def program(inputs: RoundInputs) -> DraftProgram:
        if shape.width > 1:
            return TreeLoop(model, inputs, shape, vocab_size)
        return ChainLoop(model, inputs, shape.depth)

    return Drafter(engine, attention, shape, program, area)


def _of_heads(engine: "DraftEngine", proposer: HeadsProposer, most_drafted: int) -> Drafter | None:
    """Return the drafter of heads; their first states are the target's, or the output of a layer over all of them."""
    runner, tree, vocab_size = engine.worker.forward, proposer.tree, engine.worker.sampler.vocab_size
    shape = proposer.beams or TreeShape(1 if tree.is_chain else len(tree.choices), tree.depth)
    if type(proposer) is not registry.load(proposer.method) or _reads_host(engine, shape):
        return None  # a user's own class may draft in any way
    if type(runner) is not ModuleRunner or not _can_capture_module(runner):
        return None
    module: Heads = runner.loaded.module
    if runner.attention is None:
        attention, newest = None, NewestFeatures(engine)
        area: FeatureArea = newest

        def begin_of(inputs: RoundInputs) -> Callable[[], torch.Tensor]:
            return lambda: module.begin(newest.newest(inputs))
    else:
        attention, area = device_attention(runner.attention, runner.cache), FeatureArea(engine, 1 + most_drafted)
        model = HeadModel(runner, attention, area, vocab_size)

        def begin_of(inputs: RoundInputs) -> Callable[[], torch.Tensor]:
            return DraftSteps(model, inputs).catch_up

    def program(inputs: RoundInputs) -> DraftProgram:
        heads = GraphedHeads(module, begin_of(inputs), vocab_size)
        if proposer.beams is not None:
            return BeamsLoop(heads, inputs, proposer.beams)
        return HeadsChain(heads, inputs, tree.depth) if tree.is_chain else HeadsTree(heads, inputs, tree)

    return Drafter(engine, attention, shape, program, area)


def _reads_host(engine: "DraftEngine", shape: TreeShape) -> bool:
    """Whether drafts are sampled or ended, or their cache is kept, by what is on the host."""
    worker = engine.worker
    is_ended = worker.early_stop is not None and shape.width == 1  # it ends chains only
    return worker.draft_sampler is not None or is_ended or isinstance(worker.cache, TargetCache)


def can_capture(runner: ModelRunner) -> bool:
    """Whether graphs can repeat forwards: recurrent layers and caches of another dtype are planned on the host."""
    return not runner.loaded.recurrent and runner.cache.dtype == runner.loaded.dtype


def _can_capture_module(runner: ModuleRunner) -> bool:
    return runner.kv_window is None and runner.cache.dtype == runner.loaded.dtype
