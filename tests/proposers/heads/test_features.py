"""Which hidden states of the target the heads read."""

import pytest

from proposers import registry
from proposers.shared.heads import HeadsProposer
from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError
from tests.support.models.head_checkpoints import CHECKPOINTS, TARGET, hydra_checkpoint


@pytest.mark.parametrize("method", CHECKPOINTS)
def test_what_they_are_fed(method: str) -> None:
    config, _ = CHECKPOINTS[method]
    proposer: type[HeadsProposer] = registry.load(method)  # type: ignore[assignment]
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=3, model="here")
    assert proposer.features_of(speculative, config, TARGET).needs == "last"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=method):
        proposer.create(speculative, None)


def test_a_hydra_prefix_is_fed_everything() -> None:
    config, _ = hydra_checkpoint("prefix-mlp", grounded=True, stored_once=True)
    speculative = SpeculativeConfig(method="hydra", num_speculative_tokens=3, model="here")
    assert registry.load("hydra").features_of(speculative, config, TARGET).needs == "all"  # type: ignore[attr-defined]
