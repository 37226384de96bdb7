"""A proposer of the user, named by its import path: model-free or with a module, on one process and worker groups."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from cluster.settings import engine_config
from cluster.transport.process_workers import ProcessWorkerGroup
from proposers import registry
from protos.config.engine import SpeculativeConfig
from protos.errors import ConfigError, InvalidRequestError
from protos.messages import WorkerInfo
from runtime.core.controller import LocalInbox
from runtime.frontend.speculation_override import apply_override
from runtime.http.schemas import CompletionRequest
from tests.support.distributed.bodies import PATIENT
from tests.support.distributed.engine import Engine, assert_same, configure, over, quick_turns, requests, threaded
from tests.support.distributed.fake_worker import make_request
from tests.support.models import synthetic, tiny_models

OWN = '''
import os
from pathlib import Path

from proposers.medusa import MedusaProposer
from protos.messages import Draft


class Echo:
    """Guesses that the newest token is said again."""

    on_worker = False
    asked = []

    @classmethod
    def create(cls, config, runner):
        return cls()

    def propose(self, rows):
        self.asked += rows
        return [Draft((row.token_ids[-1],) * row.k) for row in rows]


class Heads(MedusaProposer):
    """Medusa's heads; leaves a note of where it was asked."""

    def propose(self, rows):
        Path(__file__).with_name(f"asked-{os.getpid()}").touch()
        return super().propose(rows)


class Unbuilt:
    on_worker = True

    @classmethod
    def create(cls, config, runner):
        return cls()

    def propose(self, rows):
        return []


def function():
    return None


number = 3
'''


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the import path with the user's modules."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_guesses.py").write_text(OWN)
    (folder / "my_broken.py").write_text("raise RuntimeError('not today')")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("my_guesses", None)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So few ids that random drafts are sometimes right."""
    return tiny_models.build("llama", tmp_path_factory.mktemp("models") / "target", vocab_size=23)


@pytest.fixture(scope="module")
def heads(own: Path, target: Path) -> dict[str, Any]:
    folder = synthetic.medusa(target, heads=3).write(target.parent / "heads")
    return {"method": "my_guesses:Heads", "model": str(folder), "num_speculative_tokens": 3}


ECHO = {"method": "my_guesses:Echo", "num_speculative_tokens": 3}


def one_process(target: Path, speculative: dict[str, Any] | None) -> Engine:
    config = configure((target, target), speculative_config=speculative)
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def said(engine: Engine) -> dict[str, list[int]]:
    """What comes of a few requests; the engine is gone then."""
    try:
        engine.put(*requests(4, 20))
        return engine.finish()
    finally:
        engine.built.shutdown()


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, list[int]]:
    return said(one_process(target, None))


def assert_speculated(engine: Engine, plain: dict[str, list[int]]) -> None:
    assert_same(said(engine), plain)
    assert engine.proposed() > engine.accepted > 0


def test_in_one_process(target: Path, heads: dict[str, Any], plain: dict[str, list[int]]) -> None:
    assert_speculated(one_process(target, heads), plain)
    assert_speculated(one_process(target, ECHO), plain)
    assert registry.load(str(ECHO["method"])).asked  # type: ignore[attr-defined]


def test_after_a_method_of_ours(target: Path, heads: dict[str, Any], plain: dict[str, list[int]]) -> None:
    assert_speculated(one_process(target, {**heads, "method": ["ngram", "my_guesses:Echo", heads["method"]]}), plain)


@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_on_a_worker_group(target: Path, heads: dict[str, Any], plain: dict[str, list[int]], placement: str) -> None:
    with quick_turns():
        for keys in ({**heads, "placement": placement}, ECHO):
            config = configure((target, target), speculative_config=keys, tensor_parallel_size=2)
            assert_speculated(threaded(config), plain)


@pytest.mark.full
def test_workers_that_are_processes_import_it_too(
    own: Path, target: Path, heads: dict[str, Any], plain: dict[str, list[int]]
) -> None:
    keys = {**heads, "placement": "dedicated"}
    engine = over(ProcessWorkerGroup(PATIENT), configure((target, target), speculative_config=keys, num_threads=1))
    here = sorted(own.glob("asked-*"))
    engine.until_drafting(epoch=1)
    assert_speculated(engine, plain)
    assert len(set(own.glob("asked-*")) - set(here)) == 1


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("my_nothing:Echo", "cannot be imported .ModuleNotFoundError: No module named 'my_nothing'"),
        ("my_guesses:Ecko", "cannot be imported .AttributeError: .*Ecko"),
        ("my_broken:Echo", "cannot be imported .RuntimeError: not today"),
        ("my_guesses:", "cannot be imported"),
        (":Echo", "cannot be imported"),
        (".my_guesses:Echo", "cannot be imported"),
        (
            "my_guesses:function",
            "is not a proposer: it lacks being a class, on_worker, True or False, create, propose;",
        ),
        ("my_guesses:number", "is not a proposer: it lacks being a class"),
        ("my_guesses:Draft", "is not a proposer: it lacks on_worker, True or False, create, propose;"),
        ("my_guesses:Unbuilt", "is not a proposer: it lacks features_of, build;"),
    ],
)
def test_what_is_no_proposer_is_refused_before_anything_loads(own: Path, target: Path, path: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        assemble.build(configure((target / "nowhere", target), speculative_config={**ECHO, "method": path}))
    assert repr(path) in str(caught.value)


def speculative(**keys: Any) -> SpeculativeConfig:
    config = engine_config({"model": "m", "speculative_config": keys}).speculative
    assert config is not None
    return config


def test_paths_keep_their_spelling_and_take_every_key(heads: dict[str, Any]) -> None:
    """What a checkpoint is for is the class's business, and so are width and shape of its trees."""
    config = speculative(method="My-Pkg.my_mod:Some_MTP", model=heads["model"], eagle_topk=4, num_steps=3)
    assert (config.method, config.model, config.eagle_topk, config.num_steps) == (
        "My-Pkg.my_mod:Some_MTP",
        heads["model"],
        4,
        3,
    )
    tree = ((0,), (1,), (0, 0))
    assert speculative(method="a:B", speculative_token_tree=tree).speculative_token_tree == tree
    assert speculative(method="a:B").num_speculative_tokens == 5
    with pytest.raises(ConfigError, match=r"'a\.b' is not available; .*, or package\.module:Class for one"):
        speculative(method="a.B")


@pytest.mark.parametrize("loaded", [(), ("ngram", "draft_model"), ("my_guesses:Echo",)])
def test_no_request_can_name_one_that_is_not_loaded(loaded: tuple[str, ...]) -> None:
    info = WorkerInfo(32, 4, 64, 10, methods=loaded, num_speculative_tokens=4)
    for asked in ({"method": "os:system"}, {"enabled": True, "method": "my_other_guesses:Echo"}):
        body = CompletionRequest.model_validate({"prompt": "x", "speculative_config": asked})
        with pytest.raises(InvalidRequestError, match="speculative_config"):
            apply_override([make_request("a", [1])], body.speculation_override, info)
    assert "my_other_guesses" not in sys.modules
