"""What is known of a model's layers without loading it: K/V shapes, and the hidden states a draft module reads."""

from typing import Literal, NamedTuple

import msgspec

Needs = Literal["none", "last", "all"]


class LayerShape(NamedTuple):
    """Number of heads and head sizes of one layer's K and V (the sizes may differ, as in deepseek_v3).

    `values_in_keys`: V is the first `value_size` numbers of K, and not stored beside it, as for latents of MLA.
    """

    kv_heads: int
    key_size: int
    value_size: int
    values_in_keys: bool = False

    @property
    def elements_per_token(self) -> int:
        """Numbers cached for one token."""
        return self.kv_heads * (self.key_size + (0 if self.values_in_keys else self.value_size))


class FeatureSpec(msgspec.Struct, frozen=True):
    """Which hidden states of the target are fed to a proposer.

    Attributes:
        needs: "none"; "last": those of the last token the target has computed, from which it sampled the newest known
            token; "all": those of every committed token, prompts included.
        inputs_of: decoder layers, from 0, whose *input* is taken (the residual stream; n, the number of layers, means
            the output of the last one before the final norm), concatenated in this order. Empty: the state that the
            target's head reads, after the final norm.
    """

    needs: Needs = "none"
    inputs_of: tuple[int, ...] = ()
