"""Reading synthetic checkpoints with the reader of their method."""

from pathlib import Path
from typing import Any

import torch

from proposers.formats import dflash, eagle, eagle3, hydra, medusa, mlp_speculator, p_eagle, recurrent
from tests.support.models import synthetic
from tests.support.models.synthetic import Synthetic

READERS: dict[str, Any] = {
    "medusa": medusa,
    "mlp_speculator": mlp_speculator,
    "hydra": hydra,
    "recurrent": recurrent,
    "eagle": eagle,
    "eagle3": eagle3,
    "p_eagle": p_eagle,
    "dflash": dflash,
}
WIDTH, VOCAB = 32, 96


def opened(made: Synthetic, target: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return the spec and the canonical tensors of *made*."""
    reader = READERS[made.method]
    spec = reader.read(made.config, synthetic.config_of(target), made.shapes)
    return spec, reader.load(spec, made.tensors)


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)
