"""Name -> proposer. Adding one is a file beside this and a line below; its module loads on first use.

A user's own class goes by its import path, `package.module:Class`, in place of a name.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, cast

from protos.config.engine import SpeculativeConfig
from protos.config.method import is_import_path
from protos.draft_module import DraftRunner, LearnedProposer
from protos.errors import ConfigError
from protos.interfaces import Proposer

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

_METHODS = ("create", "propose")
_LEARNED_METHODS = ("features_of", "build")


def names() -> tuple[str, ...]:
    """Return the methods that can be asked for, in alphabetical order."""
    return tuple(sorted(_PROPOSERS))


def load(method: str) -> type[Proposer]:
    """Import and return the class of *method*, a name or an import path.

    Raises:
        ConfigError: names the methods there are, or says why the path leads to no proposer.
    """
    if is_import_path(method):
        return _own(method)
    path = _PROPOSERS.get(method)
    if path is None:
        raise ConfigError(
            f"speculative method {method!r} is not available; choose one of: {', '.join(names())}, or "
            "package.module:Class for one of your own"
        )
    return cast(type[Proposer], _imported(path))


def _imported(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _own(path: str) -> type[Proposer]:
    try:
        found = _imported(path)
    except Exception as error:  # its module may raise anything
        raise ConfigError(
            f"speculative method {path!r} cannot be imported ({type(error).__name__}: {error}); it must "
            "be package.module:Class, installed or on PYTHONPATH wherever a worker runs"
        ) from error
    lacking = list(_lacking(found))
    if lacking:
        raise ConfigError(
            f"speculative method {path!r} is no proposer: it lacks {', '.join(lacking)}; see "
            "protos.interfaces.Proposer, and protos.draft_module.LearnedProposer for those with a module"
        )
    return cast(type[Proposer], found)


def _lacking(found: Any) -> Iterable[str]:
    """Yield what *found* would have to have to be a proposer's class."""
    if not isinstance(found, type):
        yield "being a class"
    on_worker = getattr(found, "on_worker", None)
    if not isinstance(on_worker, bool):
        yield "on_worker, True or False"
    for name in (*_METHODS, *_LEARNED_METHODS * (on_worker is True)):
        if not callable(getattr(found, name, None)):
            yield name


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
    return [load(method).create(config, None) for method in config.methods if not load(method).on_worker]


def worker_method(config: SpeculativeConfig) -> str | None:
    """Return the method that runs on the draft worker, None where none does.

    Raises:
        ConfigError: there are several, or others come behind it and would never be asked.
    """
    cascade = config.methods
    learned = [method for method in cascade if load(method).on_worker]
    if len(learned) > 1:
        raise ConfigError(
            f"of the methods {', '.join(cascade)}, {len(learned)} run on the draft worker "
            f"({', '.join(learned)}), where one can; name one of them"
        )
    if learned and cascade[-1] != learned[0]:
        raise ConfigError(
            f"of the methods {', '.join(cascade)}, those behind {learned[0]!r} would never be asked: "
            "it always has a guess; put it last"
        )
    return learned[0] if learned else None
