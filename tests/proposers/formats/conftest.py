"""A target that drafters of six layers fit."""

from pathlib import Path

import pytest

from tests.support.models import tiny_models


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("target"), num_hidden_layers=6)
