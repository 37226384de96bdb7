"""Name -> proposer. Adding one is a file beside this and a line below; its module loads on first use."""

from importlib import import_module
from typing import cast

from protos.config import SpeculativeConfig
from protos.errors import ConfigError
from protos.interfaces import Proposer
from protos.learned import DraftRunner, LearnedProposer

_PROPOSERS: dict[str, str] = {
    "dflash": "proposers.dflash:DFlashProposer",
    "draft_model": "proposers.draft_model:DraftModelProposer",
    "eagle": "proposers.eagle:EagleProposer",
    "eagle3": "proposers.eagle3:Eagle3Proposer",
    "hydra": "proposers.hydra:HydraProposer",
    "lookahead": "proposers.lookahead:LookaheadProposer",
    "medusa": "proposers.medusa:MedusaProposer",
    "mlp_speculator": "proposers.mlp_speculator:MLPSpeculatorProposer",
    "mtp": "proposers.mtp:MtpProposer",
    "ngram": "proposers.ngram:NgramProposer",
    "p_eagle": "proposers.p_eagle:ParallelEagleProposer",
    "pard": "proposers.pard:PardProposer",
    "recurrent": "proposers.recurrent:RecurrentProposer",
    "rest": "proposers.rest:RestProposer",
    "suffix": "proposers.suffix:SuffixProposer",
}


_LANGUAGE_MODELS = frozenset({"draft_model"})
"""Methods that draft with a whole model, which the worker loads as it loads targets."""


def names() -> tuple[str, ...]:
    """Return the methods that can be asked for, in alphabetical order."""
    return tuple(sorted(_PROPOSERS))


def load(method: str) -> type[Proposer]:
    """Import and return the class of *method*; raises `ConfigError` naming the methods there are."""
    path = _PROPOSERS.get(method)
    if path is None:
        raise ConfigError(f"speculative method {method!r} is not available; choose one of: {', '.join(names())}")
    module, _, name = path.partition(":")
    proposer: type[Proposer] = getattr(import_module(module), name)
    return proposer


def learned(config: SpeculativeConfig) -> type[LearnedProposer] | None:
    """Return the class on the draft worker that has a module of its own; None where there is none."""
    method = worker_method(config)
    return None if method is None or method in _LANGUAGE_MODELS else cast(type[LearnedProposer], load(method))


def create(config: SpeculativeConfig, runner: DraftRunner) -> Proposer:
    """Return the proposer of the draft worker, for the runner of its module."""
    method = worker_method(config)
    if method is None:
        raise ConfigError(f"speculative method {config.method!r} has no part on a draft worker")
    return load(method).create(config, runner)


def beside_controller(config: SpeculativeConfig) -> list[Proposer]:
    """Return the proposers that run beside the controller, in the order in which they are asked; maybe none."""
    return [load(method).create(config, None) for method in methods(config) if not load(method).on_worker]


def worker_method(config: SpeculativeConfig) -> str | None:
    """Return the method that runs on the draft worker, None where none does.

    Raises:
        ConfigError: there are several, or others come behind it and would never be asked.
    """
    cascade = methods(config)
    learned = [method for method in cascade if load(method).on_worker]
    if len(learned) > 1:
        raise ConfigError(f"of the methods {', '.join(cascade)}, {len(learned)} run on the draft worker "
                          f"({', '.join(learned)}), where one can; name one of them")
    if learned and cascade[-1] != learned[0]:
        raise ConfigError(f"of the methods {', '.join(cascade)}, those behind {learned[0]!r} would never be asked: "
                          "it always has a guess; put it last")
    return learned[0] if learned else None


def methods(config: SpeculativeConfig) -> tuple[str, ...]:
    """Return the methods of *config* in the order in which they are asked: one, or several in a cascade."""
    return (config.method,) if isinstance(config.method, str) else config.method
