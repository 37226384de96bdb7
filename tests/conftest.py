"""What every test shares: no network, few threads, the demo pair, and the rule for tests marked `full`."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# Read by torch, huggingface_hub and tokenizers when they are imported, so set before any of them can be.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"


@dataclass(frozen=True)
class ModelPair:
    """Folders of a target and its draft."""

    target: Path
    draft: Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the full forms, which take long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full") or "full" in config.getoption("markexpr"):
        return
    full = [item for item in items if "full" in item.keywords]
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if "full" not in item.keywords]


@pytest.fixture(scope="session")
def demo_pair() -> ModelPair:
    """Return the folders of the embedded demo target and draft."""
    from demo import pair

    return ModelPair(*pair())


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Yield an empty folder whose path is short enough for a socket (about 100 bytes), unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="slip-"))
    yield folder
    shutil.rmtree(folder)
