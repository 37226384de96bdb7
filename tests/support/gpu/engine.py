"""Engines on the pretended GPU: their tokens, and what every round asked of the device."""

import contextlib
import functools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from protos.messages import RoundPlan, Verdict
from slipstream import LLM, SamplingParams
from tests.support.gpu.counts import Counts
from tests.support.gpu.graphs import PretendGraph
from tests.support.gpu.machine import Machine
from tests.support.gpu.pretend import PretendTensor
from tests.support.models.tiny_models import build
from tests.support.policies import always
from workers.gpu.sizes import SamplerKind
from workers.target_rank import TargetRank, UniExecutor

PLACES = {"max_model_len": 64, "num_gpu_blocks_override": 64}


@dataclass(frozen=True)
class Served:
    """What an engine did.

    Attributes:
        outputs: token ids of each prompt's continuation.
        rounds: every plan, and what its round asked of the device.
        rank: what ran them.
        proposed, accepted: draft tokens.
        propose_s: seconds that drafting took, as rounds report them.
    """

    outputs: list[list[int]]
    rounds: list[tuple[RoundPlan, Counts]]
    rank: TargetRank
    proposed: int
    accepted: int
    propose_s: float

    def decoding(self, num_rows: int, k: int = 0) -> list[Counts]:
        """Return the rounds in which *num_rows* rows decode, the longest draft of which has *k* tokens."""
        return [
            counts
            for plan, counts in self.rounds
            if plan.decodes and len(plan.rows) == num_rows and max(row.k for row in plan.rows) == k
        ]


def serve(
    machine: Machine,
    model: Path,
    prompts: Seq[Seq[int]],
    params: SamplingParams | list[SamplingParams],
    **arguments: Any,
) -> Served:
    """Run *prompts* through a new engine on *machine*, all at once."""
    rounds: list[tuple[RoundPlan, Counts]] = []
    ranks: list[TargetRank] = []
    run = UniExecutor.run

    def counted(executor: UniExecutor, plan: RoundPlan) -> list[Verdict]:
        ranks.append(executor.rank)
        machine.reset()
        verdicts = run(executor, plan)
        rounds.append((plan, machine.reset()))
        return verdicts

    options = {"dtype": "float32", "skip_tokenizer_init": True, "skip_self_check": True, "device": "cuda", **PLACES}
    options |= arguments
    options["speculative_config"] = always(options.get("speculative_config"))
    with mock.patch.object(UniExecutor, "run", counted), LLM(model=str(model), **options) as llm:
        outputs = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, params, use_tqdm=False)]
        stats = llm.stats()
    return Served(outputs, rounds, ranks[-1], stats.proposed, stats.accepted, stats.phases.propose_s)


def one_ahead(number: int) -> list[int]:
    """Return how many graphs each of so many plain rounds launches, which follow one another: the last is running."""
    return [2, *[1] * (number - 2), 0]


@contextlib.contextmanager
def only(rows: int, *kinds: SamplerKind, forwards: tuple[int, ...] = ()) -> Iterator[None]:
    """Let engines capture few sizes, since captures take long here: rounds of *rows* for *kinds*, and *forwards*."""
    with (
        mock.patch.multiple("workers.gpu.build", row_sizes=lambda _most: [rows], SAMPLER_KINDS=kinds),
        mock.patch("workers.gpu.sizes.TOKENS", forwards),
    ):
        yield


def lasting_tensors(owner: object) -> list[torch.Tensor]:
    """Return the tensors on the device that *owner* keeps, through whatever it refers to, recordings left out."""
    found: list[torch.Tensor] = []
    seen, waiting = set[int](), [owner]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, PretendGraph | Machine | type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, PretendTensor):
            found.append(each)
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list | tuple | set | frozenset):
            waiting += each
        elif isinstance(each, functools.partial):
            waiting += [each.func, *each.args, *each.keywords.values()]
        else:
            waiting += [getattr(each, "__self__", None), getattr(each, "__dict__", None), *_closure(each)]
    return found


def _closure(function: object) -> list[object]:
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def llamas(folder: Path, target_layers: int, draft_layers: int) -> tuple[Path, Path]:
    """Save a Llama of tiny widths, and a draft for it that has its first layers."""
    target = build("llama", folder / "target", num_hidden_layers=target_layers, spread=0.2)
    draft = build("llama", folder / "draft", num_hidden_layers=draft_layers, spread=0.2)
    return target, draft
