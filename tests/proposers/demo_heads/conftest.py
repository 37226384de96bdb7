"""A tiny target, and a lesson taken from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo.heads import Lesson, Teacher, anchors
from tests.support.models import tiny_models


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("target"), spread=0.1, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def teacher(target: Path) -> Teacher:
    return Teacher(AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))


@pytest.fixture(scope="module")
def lesson(teacher: Teacher) -> Lesson:
    ids_BL = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(3))
    return teacher.teach(ids_BL, anchors(ids_BL, 7, 5))


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
