"""Maps method names to proposer classes, whose modules are imported on first use. A new method needs a line here.

A user's own class is given by its import path, `package.module:Class`, instead of a name.
"""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, cast

from protos.config.engine import SpeculativeConfig
from protos.config.kv_window import SELF_WINDOW
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
    "self_window": "proposers.self_window:SelfWindowProposer",
    "suffix": "proposers.suffix:SuffixProposer",
}


_LANGUAGE_MODELS = frozenset({"draft_model", SELF_WINDOW})
"""Methods that draft with a whole model, which the worker loads like a target."""

_METHODS = ("create", "propose")
_LEARNED_METHODS = ("features_of", "build")


def names() -> tuple[str, ...]:
    """Return the available methods, in alphabetical order."""
    return tuple(sorted(_PROPOSERS))


def load(method: str) -> type[Proposer]:
    """Import and return the class of *method*, a name or an import path.

    Raises:
        ConfigError: names the available methods, or why the path is not a proposer.
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
            f"speculative method {path!r} is not a proposer: it lacks {', '.join(lacking)}; see "
            "protos.interfaces.Proposer, and protos.draft_module.LearnedProposer for those with a module"
        )
    return cast(type[Proposer], found)


def _lacking(found: Any) -> Iterable[str]:
    """Yield what *found* lacks to be a proposer class."""
    if not isinstance(found, type):
        yield "being a class"
    on_worker = getattr(found, "on_worker", None)
    if not isinstance(on_worker, bool):
        yield "on_worker, True or False"
    for name in (*_METHODS, *_LEARNED_METHODS * (on_worker is True)):
        if not callable(getattr(found, name, None)):
            yield name


def learned(config: SpeculativeConfig) -> type[LearnedProposer] | None:
    """Return the proposer class with a module of its own that runs on the draft worker; None if there is none."""
    method = worker_method(config)
    return None if method is None or method in _LANGUAGE_MODELS else cast(type[LearnedProposer], load(method))


def create(config: SpeculativeConfig, runner: DraftRunner) -> Proposer:
    """Return the proposer on the draft worker, whose module *runner* runs."""
    method = worker_method(config)
    if method is None:
        raise ConfigError(f"speculative method {config.method!r} does not run on a draft worker")
    return load(method).create(config, runner)


def controller_proposers(config: SpeculativeConfig) -> list[Proposer]:
    """Return the proposers that run in the controller process, in cascade order; maybe none."""
    return [load(method).create(config, None) for method in config.methods if not load(method).on_worker]


def worker_method(config: SpeculativeConfig) -> str | None:
    """Return the method that runs on the draft worker, None if none does.

    Raises:
        ConfigError: there are several, or others follow it and would never be used.
    """
    cascade = config.methods
    learned = [method for method in cascade if load(method).on_worker]
    if len(learned) > 1:
        raise ConfigError(
            f"of the methods {', '.join(cascade)}, {len(learned)} run on the draft worker "
            f"({', '.join(learned)}), which has room for one; name one of them"
        )
    if learned and cascade[-1] != learned[0]:
        raise ConfigError(
            f"of the methods {', '.join(cascade)}, those after {learned[0]!r} would never be used: "
            "it always has a draft; put it last"
        )
    return learned[0] if learned else None
