"""What an engine whose target has recurrent layers cannot do, and the memory that their states take."""

from protos.config.engine import EngineConfig
from protos.config.kv_window import SELF_WINDOW
from protos.errors import ConfigError
from workers.model.loaded import LoadedModel
from workers.recurrent.pool import bytes_per_state

LOOKAHEAD = "lookahead"
STATES_PER_SEQUENCE = 2
"""Of the prefix cache: one where the prompt ends, and one that moves with the sequence."""
STATES_SHARE = 0.25
"""Of the memory beside the states of running sequences: at most so much is for those of the prefix cache."""


def check_speculation(config: EngineConfig, model: LoadedModel) -> None:
    """Raise `ConfigError` if drafts would not be chains, or would change the target's states.

    A recurrent layer has one state after each token of a chain; the nodes of a tree would each need a forward of
    their own branch.
    """
    speculative = config.speculative
    if speculative is None:
        return
    name = f"{config.model.model} (model_type {model.model_type!r}) has recurrent layers"
    for method in (SELF_WINDOW, LOOKAHEAD):
        if method in speculative.methods:
            raise ConfigError(f"{name}, with which method {method!r} does not work; use another method")
    if speculative.may_branch:
        raise ConfigError(
            f"{name}, which verify chains only, and drafts of method {speculative.method!r} may be trees: set "
            "draft_shape 'chain' in speculative_config"
        )


def draft_places(config: EngineConfig) -> int:
    """Return how many places after the known tokens a draft may take."""
    return 0 if config.speculative is None else config.speculative.draft_places


def blocks_beside(config: EngineConfig, slot_bytes: int, fitting: int, bytes_each: int) -> int:
    """Return how many of *fitting* KV blocks of *bytes_each* fit beside the states of `max_num_seqs` sequences.

    Those of one sequence, in the models of this process, take *slot_bytes*.

    Raises:
        ConfigError: the states alone take more memory than there is.
    """
    if config.cache.num_blocks is not None or not slot_bytes:
        return fitting
    slots, bytes_each = config.scheduler.max_num_seqs, max(1, bytes_each)
    left = fitting - -(-slots * slot_bytes // bytes_each)
    if left < 1:
        raise ConfigError(
            f"the recurrent states of {slots} sequences take {slots * slot_bytes >> 20} MiB ({slot_bytes >> 10} KiB "
            f"each), and all caches may take {fitting * bytes_each >> 20} MiB: lower max_num_seqs or "
            "num_speculative_tokens, or give the cache more memory"
        )
    return left


def states_beside(config: EngineConfig, model: LoadedModel, fitting: int, bytes_each: int) -> tuple[int, int]:
    """Return how many of *fitting* KV blocks of *bytes_each* are left, and how many states the prefix cache has beside.

    These are `STATES_PER_SEQUENCE` for each of `max_num_seqs` sequences, or as many as `STATES_SHARE` of the memory
    holds, if that is less.
    """
    if not config.cache.enable_prefix_caching:
        return fitting, 0
    wanted = STATES_PER_SEQUENCE * config.scheduler.max_num_seqs
    if config.cache.num_blocks is not None:
        return fitting, wanted
    state_bytes, bytes_each = bytes_per_state(model.recurrent), max(1, bytes_each)
    wanted = min(wanted, int(STATES_SHARE * fitting * bytes_each) // state_bytes)
    return fitting - -(-wanted * state_bytes // bytes_each), wanted
