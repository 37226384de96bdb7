"""Settings and fixtures of all tests: no network, few threads, the demo pair; tests marked `full` run on request."""

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Read by torch, huggingface_hub, tokenizers and triton when they are imported, so set before any import of them.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU, by numpy; 0: those of tests/gpu on a GPU


ROOT = Path(__file__).parents[1]
RAY_VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_memory_monitor_refresh_ms": "0",
}


@dataclass(frozen=True)
class ModelPair:
    """Folders of a target and its draft."""

    target: Path
    draft: Path


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked `full`, which take long")
    parser.addoption("--fuzz-seed", type=int, default=random.SystemRandom().randrange(2**32), help="of `test_fuzz.py`")
    parser.addoption("--fuzz-requests", type=int, default=100_000, help="of the full form of `test_fuzz.py`")
    parser.addoption("--chaos-minutes", type=float, default=3.0, help="of `test_chaos.py`")
    parser.addoption("--chaos-seed", type=int, default=random.SystemRandom().randrange(2**32), help="of its faults")


def pytest_report_header(config: pytest.Config) -> str:
    return f"fuzz: --fuzz-seed {config.getoption('fuzz_seed')}"


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        _share_out(items)
    if config.getoption("--full") or "full" in config.getoption("markexpr"):
        return
    full = [item for item in items if item.get_closest_marker("full")]  # keywords contain names of folders, too
    if full:
        config.hook.pytest_deselected(items=full)
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def _share_out(items: list[pytest.Item]) -> None:
    """Of several processes, let one run a file, and one all that uses Ray: that takes longest, and begins first."""
    for item in items:
        group = "ray" if _uses_ray(item) else str(item.path.relative_to(ROOT))
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: not _uses_ray(item))


def _uses_ray(item: pytest.Item) -> bool:
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    return folder in ("ray", "ray_serve") or "ray_cluster" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def fuzz_seed(request: pytest.FixtureRequest) -> int:
    """Return the seed of generated requests: another one in every run, unless it is given."""
    return int(request.config.getoption("fuzz_seed"))


@pytest.fixture(scope="session")
def fuzz_requests(request: pytest.FixtureRequest) -> int:
    """Return the number of generated requests in the full form."""
    return int(request.config.getoption("fuzz_requests"))


@pytest.fixture(scope="session")
def demo_pair() -> ModelPair:
    """Return the folders of the embedded demo target and draft."""
    from demo import pair

    return ModelPair(*pair())


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def running() -> Iterator[list[Any]]:
    """Yield a list of `tests.support.distributed.engine.Engine`, to be shut down when the test ends."""
    from tests.support.distributed.engine import quick_turns

    engines: list[Any] = []
    with quick_turns():
        yield engines
    for engine in engines:
        engine.built.shutdown()


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """Yield Ray, connected to a cluster started for this session: 16 logical CPUs and 8 logical GPUs on one node."""
    os.environ.update(RAY_VARIABLES)
    import ray

    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # paths of sockets must be short
    with pytest.MonkeyPatch.context() as patch:  # workers import the tests' functions
        patch.setenv("PYTHONPATH", str(ROOT))
        ray.init(
            address="local",
            num_cpus=16,
            num_gpus=8,
            include_dashboard=False,
            object_store_memory=80 * 2**20,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(folder),
        )
    yield ray
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """Yield an empty folder whose path is short enough for a socket (about 100 bytes), unlike `tmp_path`."""
    folder = Path(tempfile.mkdtemp(prefix="slip-"))
    yield folder
    shutil.rmtree(folder)
