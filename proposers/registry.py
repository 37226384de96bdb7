"""Name -> proposer. Adding one is a file beside this and a line below; its module loads on first use."""

from importlib import import_module

from protos.config import SpeculativeConfig
from protos.errors import ConfigError
from protos.interfaces import Proposer
from protos.learned import DraftRunner

_PROPOSERS: dict[str, str] = {
    "draft_model": "proposers.draft_model:DraftModelProposer",
    "ngram": "proposers.ngram:NgramProposer",
}


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


def create(config: SpeculativeConfig, runner: DraftRunner | None = None) -> Proposer:
    """Return the proposer *config* asks for; *runner* is given on the draft worker."""
    return load(only_method(config)).create(config, runner)


def only_method(config: SpeculativeConfig) -> str:
    """Return the one method of *config*."""
    if not isinstance(config.method, str):
        raise ConfigError(f"a cascade of methods ({', '.join(config.method)}) is not available; name one method")
    return config.method
