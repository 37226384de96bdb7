"""The draft of a process: loaded beside a target or alone, given tables, asked for guesses, told what came of them.

Loading has two steps, because how many KV blocks there are is settled in between: `load_draft` reads weights, and
`DraftEngine.of` makes caches. Everything that runs a draft (one process, a target rank, a draft rank) does these two.
"""

import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from proposers import registry
from protos.config.engine import EngineConfig, ModelConfig, SpeculativeConfig
from protos.draft import NO_DRAFT, Draft, DraftRow
from protos.draft_module import LearnedProposer
from protos.errors import ConfigError
from protos.layers import FeatureSpec
from protos.messages import RoundPlan, Row, Verdict
from protos.progress import ProgressCallback
from workers.attention.kv import bytes_per_block
from workers.device import weight_bytes
from workers.draft.sampling import drawing_for
from workers.draft.vocab_map import Dictionary, translated
from workers.draft.weights import DraftCheckpoint, Lender, ResidentLender, StoredLender
from workers.draft.worker import DraftWorker, Proposes
from workers.features import Features
from workers.model.draft_forward import DraftForward
from workers.model.loaded import LoadedModel
from workers.model.loader import load, pick_device, pick_dtype
from workers.model.module_runner import LoadedModule, ModuleRunner
from workers.model.runner import ModelRunner
from workers.sampling.sampler import Sampler
from workers.slots import SlotTable
from workers.target import TargetWorker
from workers.verification.draft_probs import DraftProbsBySlot
from workers.weights.building import BUILDING
from workers.weights.hub import HEADS, describe, fetch, fetch_ends, fetch_tokenizer

logger = logging.getLogger(__name__)

REHEARSALS = 3  # of which the fastest counts


class LoadedDraft(Protocol):
    """Weights that draft, in place."""

    @property
    def num_bytes(self) -> int:
        """Of the weights that only the draft has."""
        ...

    @property
    def spec(self) -> FeatureSpec:
        """What it is fed."""
        ...

    @property
    def width(self) -> int:
        """Numbers in the target's features of one token."""
        ...

    @property
    def shift(self) -> int:
        """See `protos.draft_module.Module`."""
        ...

    def bytes_per_block(self, block_size: int) -> int:
        """Return what a KV block takes."""
        ...

    def forward(self, slots: SlotTable, num_blocks: int, say: ProgressCallback) -> DraftForward:
        """Give it a cache; compile where that wins."""
        ...


@dataclass(frozen=True)
class LanguageDraft:
    """A causal language model; `dictionary` where its vocabulary is another than the target's."""

    loaded: LoadedModel
    is_eager: bool
    dictionary: Dictionary | None = None
    spec = FeatureSpec()
    shift = 0
    width = 0

    @property
    def num_bytes(self) -> int:
        """See `LoadedDraft`."""
        return weight_bytes(self.loaded.model)

    def bytes_per_block(self, block_size: int) -> int:
        """See `LoadedDraft`."""
        return bytes_per_block(self.loaded.layers, block_size, self.loaded.dtype)

    def forward(self, slots: SlotTable, num_blocks: int, say: ProgressCallback) -> DraftForward:
        """See `LoadedDraft`."""
        runner = ModelRunner(self.loaded, slots, num_blocks, slots.block_size)
        if not self.is_eager:
            say("warming up the draft")
            say(f"draft: {runner.warm_up()}")
        return translated(runner, self.loaded, self.dictionary)


@dataclass(frozen=True)
class ModuleDraft:
    """The module of a learned proposer."""

    loaded: LoadedModule
    spec: FeatureSpec
    width: int

    @property
    def shift(self) -> int:
        """See `LoadedDraft`."""
        return int(self.loaded.module.shift)

    @property
    def num_bytes(self) -> int:
        """See `LoadedDraft`."""
        return weight_bytes(self.loaded.module)

    def bytes_per_block(self, block_size: int) -> int:
        """See `LoadedDraft`."""
        return bytes_per_block(self.loaded.layers, block_size, self.loaded.dtype)

    def forward(self, slots: SlotTable, num_blocks: int, say: ProgressCallback) -> ModuleRunner:
        """See `LoadedDraft`."""
        return ModuleRunner(self.loaded, slots, num_blocks, slots.block_size)


@dataclass(frozen=True)
class DraftEngine:
    """A draft that is ready: the worker that keeps it level, and the proposer that guesses with it.

    `width` is that of the target's features of one token.
    """

    worker: DraftWorker
    proposer: Proposes
    width: int = 0

    @classmethod
    def of(
        cls,
        draft: LoadedDraft,
        config: EngineConfig,
        slots: SlotTable,
        sampler: Sampler,
        *,
        num_blocks: int,
        say: ProgressCallback,
    ) -> "DraftEngine":
        """Give a loaded draft its cache, and make its proposer."""
        speculative = speculation_of(config)
        worker = DraftWorker(
            draft.forward(slots, num_blocks, say),
            slots,
            sampler,
            config.scheduler.max_num_batched_tokens,
            needs=draft.spec.needs,
            shift=draft.shift,
            drawing=drawing_for(speculative, sampler),
        )
        return cls(worker, registry.create(speculative, worker), draft.width)

    def ask(self, rows: Seq[Row]) -> list[Draft]:
        """Return the drafts of *rows*. A draft that fails costs guesses, never a request."""
        asked = [DraftRow(row.slot, row.k) for row in rows]
        try:
            drafts = self.worker.propose(self.proposer, asked)
            vocab_size = self.worker.sampler.vocab_size
            return [draft.valid_prefix(row.k, vocab_size) for draft, row in zip(drafts, asked, strict=True)]
        except Exception:
            logger.exception("the draft failed; these rows go on without guesses")
            return [NO_DRAFT] * len(asked)

    def laws(self, rows: Seq[Row], drafts: Seq[Draft]) -> DraftProbsBySlot:
        """Return what *drafts*, which `ask` has just said, were drawn from."""
        return self.worker.laws([row.slot for row in rows], drafts)

    def learn(self, plan: RoundPlan, target: TargetWorker, verdicts: Seq[Verdict]) -> None:
        """Take the features of the round that *target* has just scored, if it speculates. Failures cost guesses."""
        if self.worker.needs == "none" or not plan.speculates:
            return
        try:
            self.worker.receive(target.kept(plan.rows, verdicts))
            self.worker.absorb([row.slot for row in plan.rows if not row.samples])
        except Exception:
            logger.exception("the draft failed to take the target's features; it goes on without them")

    def measure(self, num_rows: int, k: int) -> dict[int, float]:
        """Return seconds of a guess for 1, 2, 4 ... rows, to *num_rows* at least or all slots. Before any is served."""
        found = self.worker.forward.measure(num_rows)
        most = min(num_rows, len(self.worker.slots.known_len))
        sizes = sorted({*(1 << power for power in range(most.bit_length())), most})
        return found or {size: self._rehearse(size, k) / k for size in sizes}

    def _rehearse(self, num_rows: int, k: int) -> float:
        """Return the seconds of *k* guesses for each of *num_rows* made-up sequences."""
        rows = [DraftRow(slot, k) for slot in range(num_rows)]
        took = []
        for _ in range(REHEARSALS):
            self._pretend(num_rows, k)
            started = time.perf_counter()
            self.worker.propose(self.proposer, rows)
            took.append(time.perf_counter() - started)
        self.worker.forget()
        self.worker.slots.clear()
        return min(took)

    def _pretend(self, num_rows: int, k: int) -> None:
        """Let every slot have a sequence of two tokens, all of whose blocks are block 0."""
        slots = self.worker.slots
        slots.clear()
        self.worker.forget()
        slots.known_len[:num_rows] = 2
        slots.num_blocks[:num_rows] = -(-(2 + k) // slots.block_size)
        if self.worker.needs != "none":
            table_M4 = np.array([(slot, 0, 0, 1) for slot in range(num_rows)], np.int64)
            device, dtype = self.worker.forward.loaded.device, self.worker.forward.loaded.dtype
            self.worker.receive(Features(table_M4, torch.zeros(num_rows, self.width, dtype=dtype, device=device)))


def wants_costs(config: EngineConfig) -> bool:
    """Whether somebody asks what steps cost: nobody does where nothing speculates, or the user said when to stop."""
    speculative = config.speculative
    return (
        speculative is not None
        and not config.model.enforce_eager
        and speculative.disable_by_batch_size is None
        and speculative.num_speculative_tokens_per_batch_size is None
    )


def speculation_of(config: EngineConfig) -> SpeculativeConfig:
    """Return how *config* speculates. Raises `ConfigError` where it does not."""
    if config.speculative is None:
        raise ConfigError("a draft was started, but nothing says what it should load")
    return config.speculative


def feature_spec(config: EngineConfig) -> FeatureSpec:
    """Return what the draft of *config* is fed, by the two `config.json`; nothing where there is no draft."""
    speculative = config.speculative
    learned = None if speculative is None else registry.learned(speculative)
    if speculative is None or learned is None:
        return FeatureSpec()
    target = describe(config.model)
    draft = target if speculative.model is None else describe(_model_of(config, speculative))
    return learned.features_of(speculative, draft, target)


def load_draft(config: EngineConfig, beside: LoadedModel | None, say: ProgressCallback) -> LoadedDraft | None:
    """Load what drafts on a worker, None where nothing does.

    Args:
        config: a parsed configuration.
        beside: the target, where a whole one is in this process.
        say: told, in a line each, what is being done.

    Raises:
        ModelError, ConfigError: with what is wrong.
    """
    speculative = config.speculative
    if speculative is None or registry.worker_method(speculative) is None:
        return None
    say(f"loading the draft {speculative.model or 'out of the target'}")
    learned = registry.learned(speculative)
    if learned is not None:
        return _load_module(config, speculative, learned, beside)
    is_eager = config.model.enforce_eager if speculative.enforce_eager is None else speculative.enforce_eager
    loaded = load(_model_of(config, speculative))
    dictionary = _dictionary(config, loaded, say) if speculative.use_heterogeneous_vocab else None
    return LanguageDraft(loaded, is_eager, dictionary)


def _dictionary(config: EngineConfig, draft: LoadedModel, say: ProgressCallback) -> Dictionary:
    model = config.model
    vocab_size = int(describe(model)["vocab_size"])
    found = Dictionary.between(fetch_tokenizer(model), draft.folder, vocab_size, draft.vocab_size)
    say(f"{len(found.ours_S)} of the draft's {draft.vocab_size} tokens stand for text that a token of the target is")
    return found


def _model_of(config: EngineConfig, speculative: SpeculativeConfig) -> ModelConfig:
    """Return the draft's model, with the target's settings where it has none of its own."""
    if speculative.model is None:
        raise ConfigError(f"speculative method {speculative.method!r} needs a draft: set 'model' in speculative_config")
    dtype = config.model.dtype if speculative.dtype == "auto" else speculative.dtype
    # What a draft computes decides nothing: it need not be the same bits.
    return replace(
        config.model,
        model=speculative.model,
        revision=speculative.revision,
        dtype=dtype,
        max_model_len=speculative.max_model_len,
        batch_invariant=False,
    )


def _load_module(
    config: EngineConfig, speculative: SpeculativeConfig, learned: type[LearnedProposer], beside: LoadedModel | None
) -> ModuleDraft:
    target = describe(config.model)
    source = fetch_ends(config.model, target)
    device = pick_device(config.model.device)
    dtype, _ = pick_dtype(
        config.model.dtype if speculative.dtype == "auto" else speculative.dtype, target, source, device
    )
    lender: Lender = StoredLender(source, config.model.model, dtype, device)
    if beside is not None and beside.ranks == 1 and beside.dtype == dtype:
        lender = ResidentLender(beside.model)
    folder = None if speculative.model is None else fetch(_model_of(config, speculative), HEADS)
    described = target if speculative.model is None else describe(_model_of(config, speculative))
    spec = learned.features_of(speculative, described, target)
    parts = DraftCheckpoint(folder, folder or source, described, target, lender, dtype, device)
    with BUILDING:
        module = learned.build(speculative, parts)
    width = len(spec.inputs_of or (0,)) * int(target.get("hidden_size") or target["n_embd"])
    return ModuleDraft(LoadedModule(module, dtype, device), spec, width)
