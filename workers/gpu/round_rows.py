"""What the host knows of a round's rows before it, as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from protos.draft import Draft
from workers.sampling.sample import Ints, Penalties, SamplingLimits


@dataclass(frozen=True)
class DraftPlan:
    """What the draft does for each of R rows, int64 `[R]`.

    Attributes:
        drafted_R: number of draft tokens; of a tree that is drafted on the device the most nodes it may have.
        lacking_R: how many known tokens before the newest one the draft must be fed, too.
        levels_R: levels of a tree that is drafted on the device.
        widths_R: nodes of such a tree that are fed at each level.
        columns_R: where the features of the first token that is fed are, see `workers.gpu.drafts.features.FeatureArea`.
        lowest_R: the first entry of the draft's cache that is attended to.
    """

    drafted_R: Ints
    lacking_R: Ints
    levels_R: Ints
    widths_R: Ints
    columns_R: Ints
    lowest_R: Ints

    @classmethod
    def of_drafts(cls, drafted_R: Ints) -> "DraftPlan":
        """Return the plan of drafts that are there already."""
        nothing_R = np.zeros_like(drafted_R)
        return cls(drafted_R, nothing_R, nothing_R, nothing_R, nothing_R, nothing_R)


@dataclass(frozen=True)
class RoundRows:
    """The R rows of a round. Each feeds its newest token and then its draft.

    Attributes:
        slots_R: int64.
        seeds_R: int64, bits of the requests' seeds.
        limits: sampling parameters.
        penalties: of each.
        draft: of each row.
        trees: the drafts that are there already and are no chains, by row.
        moves_M2: see `workers.attention.kv.KVCache.move`.
        follows_R: int64, where the result of the round before has the token that each row feeds, which the host does
            not know yet; None: each feeds its newest known token.
    """

    slots_R: Ints
    seeds_R: Ints
    limits: SamplingLimits
    penalties: Penalties
    draft: DraftPlan
    trees: Mapping[int, Draft] = field(default_factory=dict)
    moves_M2: Ints = field(default_factory=lambda: np.empty((0, 2), np.int64))
    follows_R: Ints | None = None
