"""Engine arguments whose method is detected from a checkpoint."""

from typing import Any

from proposers.formats import detect
from protos.config import arguments
from protos.config.engine import EngineConfig, SpeculativeConfig
from protos.config.method import Described


def parse(detected: Described | None = None, **given: Any) -> EngineConfig:
    """Return the parsed config; `detected` replaces the detection of the checkpoint."""

    def known(_model: str, _revision: str | None) -> Described:
        assert detected is not None
        return detected

    return arguments.parse({"model": "target", **given}, detect=detect.describe if detected is None else known)


def speculative(detected: Described | None = None, **keys: Any) -> SpeculativeConfig:
    config = parse(detected, speculative_config=keys).speculative
    assert config is not None
    return config
