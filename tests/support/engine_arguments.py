"""Engine arguments parsed without a checkpoint."""

import pytest

from protos.config import arguments
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.errors import ConfigError

METHODS = ("draft_model", "ngram")


def parse(**given: object) -> EngineConfig:
    return arguments.parse({"model": "m", **given}, methods=METHODS)


def speculative(**keys: object) -> SpeculativeConfig:
    config = parse(speculative_config=keys).speculative
    assert config is not None
    return config


def refusal(**given: object) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(**given)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message
