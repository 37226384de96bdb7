"""The mask token of drafts that predict several tokens at once, under its names in configs."""

from proposers.formats.shared.layout import refuse
from proposers.formats.shared.values import Config, integer, section

KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")


def has_mask(config: Config) -> bool:
    """Whether *config* names a mask token."""
    nested = section(config, "dflash_config").get("mask_token_id")
    return nested is not None or any(config.get(key) is not None for key in KEYS)


def mask_token(title: str, config: Config, vocab_size: int) -> int:
    """Return its id.

    Args:
        title: the checkpoint's name in messages.
        config: its config; `dflash_config.mask_token_id` comes first, then the names of `KEYS` in their order.
        vocab_size: rows of the embedding that has it.

    Raises:
        ModelError: there is none, or it is outside of the embedding.
    """
    if not has_mask(config):
        refuse(title, f"its config names no mask token ({', '.join(KEYS)})")
    nested = section(config, "dflash_config")
    source = nested if nested.get("mask_token_id") is not None else config
    found = integer(title, source, *KEYS)
    if found >= vocab_size:
        refuse(title, f"its mask token is {found}, but there are {vocab_size} embeddings")
    return found
