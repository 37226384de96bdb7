"""Loading what drafts: a language model, or the module of a learned proposer.

Loading has two steps, because the number of KV blocks is settled in between: `load_draft` reads the weights, and
`workers.draft.engine.make_engine` allocates the caches.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch

from proposers import registry
from protos.config.engine import EngineConfig, KVCacheDtype, ModelConfig, SpeculativeConfig
from protos.config.kv_window import SELF_WINDOW, KVWindow
from protos.draft_module import LearnedProposer
from protos.errors import ConfigError
from protos.layers import FeatureSpec
from protos.progress import ProgressCallback
from workers.attention.kv import bytes_per_block, stored_dtype
from workers.attention.latent import attend_over_latents
from workers.device import weight_bytes
from workers.draft.vocab_map import VocabMap, translate
from workers.draft.weights import CheckpointEnds, DraftCheckpoint, LoadedEnds, TargetEnds
from workers.model.draft_forward import DraftForward
from workers.model.loaded import LoadedModel
from workers.model.loader import load, pick_device, pick_dtype
from workers.model.module_runner import LoadedModule, ModuleRunner
from workers.model.quantization import scheme_of
from workers.model.runner import ModelRunner
from workers.model.windowed_runner import WindowedRunner
from workers.recurrent.pool import NO_STATES, RecurrentShapes
from workers.slots import SlotTable
from workers.weights.building import BUILDING
from workers.weights.hub import HEADS, fetch, fetch_model, fetch_tokenizer, fetch_without_layers, read_config
from workers.weights.quantizing import quantize_module


class LoadedDraft(Protocol):
    """The loaded weights of a draft."""

    @property
    def num_bytes(self) -> int:
        """Size of the weights that only the draft has."""
        ...

    @property
    def spec(self) -> FeatureSpec:
        """The features of the target that it is fed."""
        ...

    @property
    def width(self) -> int:
        """Number of features of one token of the target."""
        ...

    @property
    def shift(self) -> int:
        """See `protos.draft_module.Module`."""
        ...

    @property
    def is_eager(self) -> bool:
        """Whether it is never compiled."""
        ...

    def bytes_per_block(self, block_size: int) -> int:
        """Return the size of a KV block."""
        ...

    @property
    def recurrent(self) -> RecurrentShapes:
        """The states of its recurrent layers; mostly none."""
        ...

    def forward(self, slots: SlotTable, num_blocks: int, target: ModelRunner | None) -> DraftForward:
        """Allocate its cache, and return what runs it. *target* runs the target, if it is in this process."""
        ...


@dataclass(frozen=True)
class LanguageDraft:
    """A causal language model; `vocab_map` maps its vocabulary to the target's where they differ.

    `kv_window` is what it reads of its KV cache; None: everything.
    """

    loaded: LoadedModel
    is_eager: bool
    vocab_map: VocabMap | None = None
    kv_window: KVWindow | None = None
    spec = FeatureSpec()
    shift = 0
    width = 0

    @property
    def num_bytes(self) -> int:
        """See `LoadedDraft`."""
        return weight_bytes(self.loaded.model)

    def bytes_per_block(self, block_size: int) -> int:
        """See `LoadedDraft`."""
        return bytes_per_block(self.loaded.layers, block_size, self.loaded.kv_dtype)

    @property
    def recurrent(self) -> RecurrentShapes:
        """See `LoadedDraft`."""
        return self.loaded.recurrent

    def forward(self, slots: SlotTable, num_blocks: int, target: ModelRunner | None) -> DraftForward:
        """See `LoadedDraft`."""
        runner = ModelRunner(self.loaded, slots, num_blocks, slots.block_size, kv_window=self.kv_window)
        return translate(runner, self.loaded, self.vocab_map)


@dataclass(frozen=True)
class TargetDraft:
    """The target of this process: its weights and its KV cache, of which a window is read. It has nothing of its own.

    `max_model_len` is the longest context to draft for; None: the target's.
    """

    kv_window: KVWindow
    max_model_len: int | None = None
    spec = FeatureSpec()
    shift = width = num_bytes = 0
    is_eager = True
    recurrent = NO_STATES

    def bytes_per_block(self, block_size: int) -> int:
        """See `LoadedDraft`."""
        return 0

    def forward(self, slots: SlotTable, num_blocks: int, target: ModelRunner | None) -> WindowedRunner:
        """See `LoadedDraft`."""
        assert target is not None, "it is loaded with the target"
        return WindowedRunner(target, self.kv_window, self.max_model_len)


@dataclass(frozen=True)
class ModuleDraft:
    """The module of a learned proposer; `kv_window` as in `LanguageDraft`."""

    loaded: LoadedModule
    spec: FeatureSpec
    width: int
    is_eager: bool
    kv_window: KVWindow | None = None
    recurrent = NO_STATES

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
        return bytes_per_block(self.loaded.layers, block_size, self.loaded.kv_dtype)

    def forward(self, slots: SlotTable, num_blocks: int, target: ModelRunner | None) -> ModuleRunner:
        """See `LoadedDraft`."""
        return ModuleRunner(self.loaded, slots, num_blocks, slots.block_size, self.kv_window)


def speculation_of(config: EngineConfig) -> SpeculativeConfig:
    """Return the speculative part of *config*. Raises `ConfigError` where there is none."""
    if config.speculative is None:
        raise ConfigError("a draft was started, but the configuration has no speculative_config")
    return config.speculative


def feature_spec(config: EngineConfig) -> FeatureSpec:
    """Return the features that the draft of *config* is fed, read from the two `config.json`; none without a draft."""
    speculative = config.speculative
    learned = None if speculative is None else registry.learned(speculative)
    if speculative is None or learned is None:
        return FeatureSpec()
    target = read_config(config.model)
    draft = target if speculative.model is None else read_config(_model_of(config, speculative))
    return learned.features_of(speculative, draft, target)


def load_draft(config: EngineConfig, loaded_target: LoadedModel | None, report: ProgressCallback) -> LoadedDraft | None:
    """Load the draft that runs on a worker; return None where *config* has none.

    Args:
        config: a parsed configuration.
        loaded_target: the target if it is loaded in this process, else None.
        report: called with a line for each stage.

    Raises:
        ModelError, ConfigError: with what is wrong.
    """
    speculative = config.speculative
    if speculative is None or registry.worker_method(speculative) is None:
        return None
    if _is_shared(config, speculative, loaded_target):
        assert speculative.kv_window is not None, "the configuration was checked"
        report("the target drafts over a window of its own KV cache")
        return TargetDraft(speculative.kv_window, speculative.max_model_len)
    report(f"loading the draft {speculative.model or 'from the target'}")
    learned = registry.learned(speculative)
    if learned is not None:
        return _load_module(config, speculative, learned, loaded_target)
    loaded = load(_model_of(config, speculative))
    if loaded.recurrent and speculative.may_branch:
        raise ConfigError(
            f"{speculative.model} (model_type {loaded.model_type!r}) has recurrent layers and drafts chains only: set "
            "draft_shape 'chain' in speculative_config"
        )
    for note in loaded.notes:
        report(f"draft: {note}")
    vocab_map = _vocab_map(config, loaded, report) if speculative.use_heterogeneous_vocab else None
    return LanguageDraft(loaded, _is_eager(config, speculative), vocab_map, speculative.kv_window)


def _is_shared(config: EngineConfig, speculative: SpeculativeConfig, target: LoadedModel | None) -> bool:
    """Whether the target drafts for itself with the weights and the cache that are in this process."""
    if SELF_WINDOW not in speculative.methods or target is None or config.model.batch_invariant:
        return False
    if stored_dtype(_kv_cache_dtype(config, speculative), target.dtype) != target.kv_dtype:
        return False
    return target.ranks == 1 and speculative.dtype in ("auto", str(target.dtype).removeprefix("torch."))


def _is_eager(config: EngineConfig, speculative: SpeculativeConfig) -> bool:
    return config.model.enforce_eager if speculative.enforce_eager is None else speculative.enforce_eager


def _vocab_map(config: EngineConfig, draft: LoadedModel, report: ProgressCallback) -> VocabMap:
    model = config.model
    vocab_size = int(read_config(model)["vocab_size"])
    found = VocabMap.of_tokenizers(fetch_tokenizer(model), draft.folder, vocab_size, draft.vocab_size)
    report(f"{len(found.target_S)} of the draft's {draft.vocab_size} tokens have the text of a token of the target")
    return found


def _model_of(config: EngineConfig, speculative: SpeculativeConfig) -> ModelConfig:
    """Return the draft's model, with the target's settings where it has none of its own."""
    model, revision, quantization = speculative.model, speculative.revision, speculative.quantization
    if SELF_WINDOW in speculative.methods:
        model, revision = config.model.model, config.model.revision
        quantization = quantization or config.model.quantization
    if model is None:
        raise ConfigError(f"speculative method {speculative.method!r} needs a draft: set 'model' in speculative_config")
    dtype = config.model.dtype if speculative.dtype == "auto" else speculative.dtype
    # The output does not depend on the draft, so its results need not be batch-invariant.
    return replace(
        config.model,
        model=model,
        revision=revision,
        dtype=dtype,
        kv_cache_dtype=_kv_cache_dtype(config, speculative),
        quantization=quantization,
        max_model_len=speculative.max_model_len,
        batch_invariant=False,
    )


def _kv_cache_dtype(config: EngineConfig, speculative: SpeculativeConfig) -> KVCacheDtype:
    return speculative.kv_cache_dtype or config.model.kv_cache_dtype


def _load_module(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    learned: type[LearnedProposer],
    loaded_target: LoadedModel | None,
) -> ModuleDraft:
    target = read_config(config.model)
    source = fetch_without_layers(config.model, target)
    device = pick_device(config.model.device)
    dtype, _ = pick_dtype(
        config.model.dtype if speculative.dtype == "auto" else speculative.dtype, target, source, device
    )
    ends: TargetEnds = CheckpointEnds(source, config.model.model, dtype, device)
    if loaded_target is not None and loaded_target.ranks == 1 and loaded_target.dtype == dtype:
        ends = LoadedEnds(loaded_target.model)
    folder = None if speculative.model is None else fetch(_model_of(config, speculative), HEADS)
    described = target if speculative.model is None else read_config(_model_of(config, speculative))
    spec = learned.features_of(speculative, described, target)
    parts = DraftCheckpoint(folder, folder or source, described, target, ends, dtype, device)
    with BUILDING:
        module = learned.build(speculative, parts)
    assert isinstance(module, torch.nn.Module), "as its protocol says"
    if speculative.quantization is not None:
        scheme = scheme_of(speculative.quantization, speculative.model or config.model.model, device)
        quantize_module(module, scheme, () if loaded_target is None else loaded_target.model.parameters())
    attend_over_latents(module, device)
    width = len(spec.inputs_of or (0,)) * int(target.get("hidden_size") or target["n_embd"])
    # With batch_invariant, the target's head, which the module may share, runs in a mode that is not compiled.
    is_eager = _is_eager(config, speculative) or config.model.batch_invariant
    kv_dtype = stored_dtype(_kv_cache_dtype(config, speculative), dtype)
    folders = folder or source, fetch_model(config.model)
    loaded = LoadedModule(module, dtype, kv_dtype, device, folders, (speculative,))
    return ModuleDraft(loaded, spec, width, is_eager, speculative.kv_window)
