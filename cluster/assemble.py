"""Builds an engine from a configuration. The only module that imports both `runtime` and `workers`."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from proposers import registry
from proposers.shared.datastore import Datastore, fingerprint
from protos.config.default_shape import for_device
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError, ModelError
from protos.interfaces import Executor, Inbox, Proposer
from protos.messages import Request, StepCosts, WorkerInfo
from protos.progress import ProgressCallback
from runtime.core.controller import Controller, LocalInbox
from runtime.core.scheduler import Scheduler
from runtime.heap import freeze_heap
from runtime.policy.base import Policy
from runtime.policy.exploration import LookUp
from runtime.policy.factory import make_policy
from runtime.text.detokenizer import Detokenizer, DetokenizerFactory
from runtime.text.preprocessor import Preprocessor
from runtime.text.sampling_defaults import default_max_tokens
from runtime.text.tokenizer import load_tokenizer
from workers.native.early import start_compilers

logger = logging.getLogger(__name__)

DRAFT_MODEL_METHODS = frozenset({"draft_model", "pard"})
"""Methods whose draft is a language model with a tokenizer of its own."""
REMEDY = ", or set use_heterogeneous_vocab in speculative_config for method 'draft_model'"


@dataclass(frozen=True)
class Assembled:
    """An engine ready to step. The caller of `controller.step()` owns it."""

    config: EngineConfig
    controller: Controller
    inbox: Inbox
    executor: Executor
    info: WorkerInfo
    tokenizer: Any

    @property
    def preprocessor(self) -> Preprocessor:
        """Makes requests from prompts, for this engine's model."""
        return make_preprocessor(self.config, self.info, self.tokenizer)

    def shutdown(self) -> None:
        """Free the workers."""
        self.executor.shutdown()


MakeExecutor = Callable[[EngineConfig, ProgressCallback], Executor]


def build(
    config: EngineConfig,
    inbox: Inbox | None = None,
    report: ProgressCallback = logger.info,
    make_executor: MakeExecutor | None = None,
    detokenizers: Callable[[Request], Detokenizer | None] | None = None,
) -> Assembled:
    """Load models and tokenizer, and wire scheduler, proposer and executor together.

    Args:
        config: a parsed configuration.
        inbox: source of requests; default: a `LocalInbox`.
        report: called with a line for each stage of loading.
        make_executor: makes the executor; default: the models run in this process.
        detokenizers: returns a request's detokenizer; default: for the model's tokenizer.

    Raises:
        ConfigError, ModelError: names the wrong value and its limit.
        PlacementError: there is no room for the workers.
    """
    if make_executor is None and config.parallel.executor == "ray":
        raise ConfigError("the ray executor runs in a process of its own: use a channel, as LLM does")
    if make_executor is None:
        start_compilers(config)
    tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(config.model)
    check_vocabularies(config, tokenizer)
    proposers = controller_proposers(config.speculative)
    executor = (make_executor or _make_uni_executor)(config, report)
    started = executor.start()
    config = for_device(config, started.device)
    info = _with_speculation(started, config.speculative)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        info,
        proposers=proposers,
        has_worker=config.speculative is not None and registry.worker_method(config.speculative) is not None,
        detokenizers=detokenizers or DetokenizerFactory(None if tokenizer is None else tokenizer.backend_tokenizer),
    )
    mailbox = inbox or LocalInbox()
    look_up = None if scheduler.proposers is None else scheduler.proposers.look_up
    controller = Controller(scheduler, _policy(config, info.costs, look_up, report), executor, mailbox)
    return Assembled(config, controller, mailbox, executor, info, tokenizer)


def build_controller(
    config: EngineConfig, inbox: Inbox, report: ProgressCallback, make_executor: MakeExecutor | None = None
) -> Controller:
    """Return the controller that `build` makes, for a process that ends with it: what was loaded is never freed."""
    controller = build(config, inbox, report, make_executor).controller
    freeze_heap()
    return controller


def _with_speculation(info: WorkerInfo, speculative: SpeculativeConfig | None) -> WorkerInfo:
    """Return *info* with the methods and the K that requests may choose from, and the places that drafting takes."""
    if speculative is None:
        return info
    return structs.replace(
        info,
        methods=speculative.methods,
        num_speculative_tokens=speculative.num_speculative_tokens,
        draft_places=speculative.draft_places,
    )


def _policy(config: EngineConfig, costs: StepCosts | None, look_up: LookUp | None, report: ProgressCallback) -> Policy:
    """Return the speculation policy of *config*, which may depend on measured costs."""
    policy, line = make_policy(config, costs, look_up)
    if config.speculative is not None:
        report(line)
    return policy


def _make_uni_executor(config: EngineConfig, report: ProgressCallback) -> Executor:
    from workers.build import build_uni  # noqa: PLC0415 - torch loads when an engine is built, not before

    return build_uni(config, report)


def controller_proposers(speculative: SpeculativeConfig | None) -> list[Proposer]:
    """Return the proposers that run in the controller process."""
    return [] if speculative is None else registry.controller_proposers(speculative)


def make_preprocessor(config: EngineConfig, info: WorkerInfo, tokenizer: Any) -> Preprocessor:
    """Return a preprocessor for the model that *info* describes; *tokenizer* is from `load_tokenizer`."""
    return Preprocessor(
        tokenizer,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        capacity=info.num_blocks * info.block_size,
        eos_ids=info.eos_ids,
        seed=config.seed,
        mixes_seeds=config.mixes_seeds,
        default_max_tokens=default_max_tokens(config.model),
        max_logprobs=config.model.max_logprobs,
    )


def check_vocabularies(config: EngineConfig, tokenizer: Any) -> None:
    """Check that the draft and the datastore of *config* were made for *tokenizer*; None is not checked.

    Raises:
        ConfigError, ModelError: one was made for another tokenizer.
    """
    speculative = config.speculative
    if speculative is None or tokenizer is None:
        return
    if must_share_tokenizer(speculative):
        check_draft_tokenizer(config, speculative, tokenizer)
    if speculative.datastore:
        check_datastore(speculative.datastore, tokenizer)


def must_share_tokenizer(speculative: SpeculativeConfig) -> bool:
    """Whether the draft is a language model that must have the target's vocabulary."""
    return (
        speculative.model is not None
        and not DRAFT_MODEL_METHODS.isdisjoint(speculative.methods)
        and not speculative.use_heterogeneous_vocab
    )


def check_draft_tokenizer(config: EngineConfig, speculative: SpeculativeConfig, tokenizer: Any) -> None:
    """Check that the draft maps tokens to the same ids as the target.

    Padded sizes may differ; ids that both have must be the same tokens.

    Raises:
        ModelError: names the first token that differs.
    """
    draft = load_tokenizer(
        replace(
            config.model,
            model=speculative.model or "",
            tokenizer=None,
            revision=speculative.revision,
            tokenizer_revision=None,
        )
    )
    theirs, ours = draft.get_vocab() if draft else {}, tokenizer.get_vocab()
    for token, index in sorted(theirs.items(), key=lambda item: item[1]):
        if ours.get(token, index) != index:
            raise ModelError(
                f"the draft {speculative.model} maps {token!r} to id {index}, the target "
                f"{config.model.model} to id {ours[token]}: they must share a tokenizer{REMEDY}"
            )
    shared = len(theirs.keys() & ours.keys())
    if shared < min(len(theirs), len(ours)) // 2:
        raise ModelError(
            f"the draft {speculative.model} shares {shared} of {len(theirs)} tokens with the target "
            f"{config.model.model}: they must share a tokenizer{REMEDY}"
        )


def check_datastore(path: str, tokenizer: Any) -> None:
    """Check that a datastore was built with the target's tokenizer.

    Raises:
        ConfigError: it was not, or it cannot be read.
    """
    if Datastore(Path(path)).fingerprint != fingerprint(tokenizer.get_vocab()):
        raise ConfigError(
            f"the datastore {path} was built with another tokenizer than the target's; build it again: "
            "slipstream build-datastore --model ..."
        )
