"""Every proposer on a draft worker, as one suite: the target's tokens are the same with all of them.

A new proposer is one entry in `CASES`: its name, what writes a checkpoint of it for a tiny target, and the options that
make it draft chains and trees.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cluster import assemble
from proposers import registry
from protos.draft import Draft, DraftRow
from protos.messages import Request, Sampling
from protos.sampling import SamplingParams
from runtime.core.controller import LocalInbox
from tests.support.distributed.engine import Engine, configure, late_comer, threaded
from tests.support.identity import generate
from tests.support.models import synthetic, synthetic_layers, tiny_models
from workers.draft.engine import DraftEngine

VOCAB = 23
"""So few ids that random drafts are sometimes right; two ranks cannot divide the number."""
ROOM: dict[str, Any] = {"max_num_seqs": 16, "max_num_batched_tokens": 96, "num_gpu_blocks_override": 400}
Options = dict[str, Any]
Outputs = dict[str, list[int]]


@dataclass(frozen=True)
class Case:
    """One kind of draft.

    Attributes:
        name: of the case.
        method: as users call it.
        write: puts a checkpoint of it for a target's folder into another folder; None: it is in the target's.
        shapes: keys of `speculative_config` by name.
        family: of the target.
        target: further config of the target.
        make: writes the target.
    """

    name: str
    method: str
    write: Callable[[Path, Path], Path] | None
    shapes: dict[str, Options]
    family: str = "llama"
    target: Options = field(default_factory=dict)
    make: Callable[..., Path] = tiny_models.build


def synthetic_of(make: Callable[..., synthetic.Synthetic], **options: Any) -> Callable[[Path, Path], Path]:
    """Return what writes a checkpoint that *make* describes."""
    return lambda target, folder: make(target, **options).write(folder)


def as_speculators_writes(target: Path, folder: Path) -> Path:
    """An EAGLE-3 head of two layers in the `speculators` format, which names its target and has norms elsewhere."""
    head = synthetic_layers.eagle3(target, kept=12, layers=2, norm_before_fc=True, norm_before_residual=True)
    return synthetic_layers.speculators(head, target).write(folder)


def dflash_as_speculators_writes(target: Path, folder: Path) -> Path:
    """A DFlash head of which one layer sees all, and one the three tokens before a block and causally the block."""
    types = ["sliding_attention", "full_attention"]
    head = synthetic_layers.dflash(target, layer_types=types, use_sliding_window=True, sliding_window=3)
    return synthetic_layers.speculators(head, target).write(folder)


def mimo(family: str, folder: Path, **options: Any) -> Path:
    """A target like MiMo's, whose config names remote code, which is never run."""
    synthetic_layers.with_mtp(family, folder, **options)
    config = synthetic.config_of(folder)
    code = {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM", "AutoConfig": "configuration_mimo.MiMoConfig"}
    told = {**config, "model_type": "mimo", "architectures": ["MiMoForCausalLM"], "auto_map": code}
    (folder / "config.json").write_text(json.dumps(told))
    return folder


CHAIN_AND_TREE: dict[str, Options] = {
    "chain": {"num_speculative_tokens": 3, "draft_shape": "chain"},
    "tree": {"num_speculative_tokens": 9, "draft_shape": "tree"},
}
CHAIN = {"chain": CHAIN_AND_TREE["chain"]}
NARROW: Options = {"draft_kv_window": 3, "draft_kv_sinks": 1}
CASES = (
    Case("mlp_speculator", "mlp_speculator", synthetic_of(synthetic.mlp_speculator, heads=3), CHAIN_AND_TREE),
    Case("medusa", "medusa", synthetic_of(synthetic.medusa, heads=3), CHAIN_AND_TREE),
    Case("medusa_2", "medusa", synthetic_of(synthetic.medusa, heads=3, own_heads=False), CHAIN_AND_TREE),
    Case("hydra", "hydra", synthetic_of(synthetic.hydra, heads=3), CHAIN_AND_TREE),
    Case("hydra_prefix", "hydra", synthetic_of(synthetic.hydra, heads=3, prefix=True), CHAIN_AND_TREE),
    Case("recurrent", "recurrent", synthetic_of(synthetic.recurrent), CHAIN_AND_TREE),
    Case("eagle", "eagle", synthetic_of(synthetic_layers.eagle), CHAIN_AND_TREE),
    Case("eagle3", "eagle3", synthetic_of(synthetic_layers.eagle3, kept=12), CHAIN_AND_TREE),
    Case("eagle3_speculators", "eagle3", as_speculators_writes, CHAIN_AND_TREE),
    Case("p_eagle", "p_eagle", synthetic_of(synthetic_layers.p_eagle, kept=None), CHAIN),
    Case("dflash", "dflash", synthetic_of(synthetic_layers.dflash), CHAIN),
    Case("dflash_speculators", "dflash", dflash_as_speculators_writes, CHAIN),
    Case("pard", "pard", synthetic_layers.pard, CHAIN),
    Case("draft_model", "draft_model", tiny_models.perturb, CHAIN_AND_TREE),
    Case("self_window", "self_window", None, {name: {**keys, **NARROW} for name, keys in CHAIN_AND_TREE.items()}),
    Case("mtp_deepseek", "mtp", None, CHAIN_AND_TREE, "deepseek_v3", make=synthetic_layers.with_mtp),
    Case("mtp_glm", "mtp", None, CHAIN_AND_TREE, "glm4_moe", make=synthetic_layers.with_mtp),
    Case("mtp_mimo", "mtp", None, CHAIN, "qwen2", make=mimo),
)
SHAPED = [pytest.param(case, shape, id=f"{case.name}-{shape}") for case in CASES for shape in case.shapes]
EACH = [pytest.param(case, id=case.name) for case in CASES]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> "Folders":
    return Folders(tmp_path_factory.mktemp("models"))


class Folders:
    """Targets by family, their outputs without speculation, and drafts by case; each built on first use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = cache(self._target)
        self.draft = cache(self._draft)
        self.plain = cache(self._plain)

    def _target(self, make: Callable[..., Path], family: str, settings: tuple[tuple[str, Any], ...]) -> Path:
        folder = self.root / "-".join([make.__name__, family, *(f"{key}_{value}" for key, value in settings)])
        return make(family, folder, vocab_size=VOCAB, **dict(settings))

    def of(self, case: Case) -> Path:
        """The target of *case*."""
        return self.target(case.make, case.family, tuple(sorted(case.target.items())))

    def _draft(self, name: str) -> Path | None:
        case = next(case for case in CASES if case.name == name)
        return case.write(self.of(case), self.root / f"draft-{name}") if case.write else None

    def _plain(self, target: Path) -> Outputs:
        """Return the expected outputs of every run."""
        engine = started(target, None)
        engine.put(*requests())
        outputs = engine.finish()
        engine.built.shutdown()
        assert engine.proposed() == 0
        return outputs

    def speculative(self, case: Case, **options: Any) -> Options:
        """Return the `speculative_config`."""
        draft = self.draft(case.name)
        return {"method": case.method, **({"model": str(draft)} if draft else {}), **options}


def test_every_method_of_a_draft_worker_is_among_the_cases() -> None:
    assert {case.method for case in CASES} == {name for name in registry.names() if registry.load(name).on_worker}


def requests() -> list[Request]:
    """Return greedy and seeded requests by turns, some with penalties; prompt lengths differ, some share a prefix."""
    shared = [3 + 7 * i % 20 for i in range(9)]
    return [
        Request(
            request_id=str(i),
            params=SamplingParams(),
            max_tokens=14 + i % 5,
            prompt_token_ids=(*shared * (i % 2), *(3 + (i * j + j * j) % 20 for j in range(1 + 3 * i % 20))),
            sampling=Sampling(
                seed=i,
                temperature=0.8 * (i % 2),
                presence_penalty=0.5 * (i % 3 == 0),
                top_p=0.95 if i % 5 == 0 else 1.0,
            ),
        )
        for i in range(17)
    ]


def started(target: Path, speculative: Options | None, **arguments: Any) -> Engine:
    """An engine in one process."""
    config = configure((target, target), speculative_config=speculative, **{**ROOM, **arguments})
    return Engine(assemble.build(config, LocalInbox(), report=lambda line: None))


def branched(engine: Engine) -> bool:
    """Whether a node was accepted that a chain would not have had there."""
    return any(
        list(verdict.path) != list(range(len(verdict.path))) for _, verdicts in engine.rounds for verdict in verdicts
    )


Drafted = list[tuple[DraftRow, Draft]]


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    """Return a list that collects all rows and what the proposer drafted for them."""
    found: Drafted = []
    checked = DraftEngine._checked

    def recording(engine: DraftEngine, rows: list[DraftRow], propose: Any) -> list[Draft]:
        def proposing(asked: list[DraftRow]) -> list[Draft]:
            drafts: list[Draft] = propose(asked)
            found.extend(zip(asked, drafts, strict=True))
            return drafts

        return checked(engine, rows, proposing)

    monkeypatch.setattr(DraftEngine, "_checked", recording)
    return found


def assert_within_the_answers(drafted: Drafted, shape: str) -> None:
    """No draft is deeper than its answer is long, and near the end trees have more nodes than levels."""
    assert all(max(draft.depths(), default=0) <= row.depth for row, draft in drafted)
    near_the_end = [len(draft) - row.depth for row, draft in drafted if row.depth <= 2 and len(draft)]
    assert near_the_end and (max(near_the_end) > 0) == (shape == "tree")


@pytest.mark.parametrize(("case", "shape"), SHAPED)
def test_in_one_process_alone_and_sixteen_together(
    case: Case,
    shape: str,
    folders: Folders,
    running: list[Engine],
    caplog: pytest.LogCaptureFixture,
    *,
    drafted: Drafted,
) -> None:
    engine = started(folders.of(case), folders.speculative(case, **case.shapes[shape]))
    running.append(engine)
    first, *others = requests()
    engine.put(first)
    engine.finish()
    alone = engine.proposed()
    assert alone > 0
    engine.put(*others)
    outputs = engine.finish()
    assert outputs == folders.plain(folders.of(case))
    assert engine.proposed() - alone > engine.accepted > 0
    assert branched(engine) == (shape == "tree")
    assert_within_the_answers(drafted, shape)
    assert "the draft failed" not in caplog.text


@pytest.mark.parametrize("case", EACH)
def test_on_a_worker_group_with_a_draft_of_its_own_that_dies_and_comes_back(
    case: Case, folders: Folders, running: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """Speculation goes off and on again meanwhile: more than three rows at once are not speculated for."""
    may_come = threading.Event()
    shape = "tree" if "tree" in case.shapes else "chain"
    options = {**case.shapes[shape], "placement": "dedicated"}
    options["num_speculative_tokens_per_batch_size"] = [[1, 3, options["num_speculative_tokens"]], [4, 99, 0]]
    config = configure(
        (folders.of(case), folders.of(case)),
        tensor_parallel_size=2,
        speculative_config=folders.speculative(case, **options),
        **ROOM,
    )
    engine = threaded(config, body=late_comer(may_come, floor_s=5.0))
    running.append(engine)
    assert engine.workers is not None
    rows = requests()
    engine.put(*rows[:3])
    engine.until(lambda: engine.proposed() > 0 and engine.num_out >= 12)
    on = len(engine.rounds)
    engine.put(*rows[3:9])
    engine.until(lambda: len(engine.rounds) >= on + 4)
    assert engine.proposed(len(engine.rounds) - 2) == 0
    engine.workers.newest("draft").crash()
    engine.until(lambda: not engine.built.executor.drafting.is_up)
    may_come.set()
    engine.until_drafting(epoch=2)
    off = len(engine.rounds)
    engine.finish()
    engine.put(*rows[9:12])
    outputs = engine.finish()
    plain = folders.plain(folders.of(case))
    assert outputs == {name: plain[name] for name in outputs}
    assert len(outputs) == 12
    assert engine.proposed(off) > 0
    assert engine.proposed() > engine.accepted > 0
    assert "the draft failed" not in caplog.text


@pytest.mark.parametrize("case", EACH)
def test_on_a_worker_group_beside_the_first_rank(
    case: Case, folders: Folders, running: list[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    shape = "chain"
    options = {**case.shapes[shape], "placement": "colocated"}
    config = configure(
        (folders.of(case), folders.of(case)),
        tensor_parallel_size=2,
        speculative_config=folders.speculative(case, **options),
        **ROOM,
    )
    engine = threaded(config)
    running.append(engine)
    engine.put(*requests()[:6])
    outputs = engine.finish()
    plain = folders.plain(folders.of(case))
    assert outputs == {name: plain[name] for name in outputs}
    assert engine.proposed() > engine.accepted > 0
    assert "the draft failed" not in caplog.text


@pytest.mark.full
@pytest.mark.parametrize(("case", "shape"), SHAPED)
def test_on_ray(case: Case, shape: str, folders: Folders, ray_cluster: Any) -> None:
    """The whole engine: two ranks and a draft, in separate processes."""
    rows = requests()
    params = [
        SamplingParams(
            temperature=row.sampling.temperature,
            seed=row.sampling.seed,
            top_p=row.sampling.top_p,
            presence_penalty=row.sampling.presence_penalty,
            max_tokens=row.max_tokens,
            ignore_eos=True,
        )
        for row in rows
    ]
    run = generate(
        folders.of(case),
        [row.prompt_token_ids for row in rows],
        params,
        tensor_parallel_size=2,
        **ROOM,
        block_size=4,
        max_model_len=128,
        speculative_config=folders.speculative(case, **case.shapes[shape]),
    )
    plain = folders.plain(folders.of(case))
    assert run.outputs == [plain[row.request_id] for row in rows]
    run.assert_speculated()
