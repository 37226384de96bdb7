"""What a proposer gets of the draft worker, over paged KV, is what dense attention over the whole text gives."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from protos.draft import DraftRow
from protos.draft_module import Level
from protos.layers import LayerShape, Needs
from tests.support.models.dense_runner import NAME as DENSE
from tests.support.models.dense_runner import DenseRunner, Text
from tests.support.models.paged_worker import paged_worker
from workers.attention.backend import NAME as PAGED
from workers.draft.worker import DraftWorker

V, H, K = 40, 16, 6
TEXTS = [[3, 4], [5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20, 21]]
ROWS = [DraftRow(slot, K) for slot in range(len(TEXTS))]
KINDS: list[tuple[Needs, int]] = [("none", 0), ("all", 1)]


class Small(torch.nn.Module):
    """Two layers of llama; what lies beside a token is added to its embedding."""

    layers = (LayerShape(2, 4, 4),) * 2
    max_model_len = 64
    vocab_size = V

    def __init__(self, attention: str, shift: int) -> None:
        super().__init__()
        self.shift = shift
        config = AutoConfig.for_model(
            "llama",
            vocab_size=V,
            hidden_size=H,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        self.model = AutoModel.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.normal_(0.0, 0.4, generator=generator) if weight.ndim > 1 else None

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        return features_TF

    def forward(
        self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TX: torch.Tensor | None
    ) -> torch.Tensor:
        embeds = self.model.embed_tokens(tokens_1T)
        embeds = embeds if features_1TX is None else embeds + features_1TX
        states: torch.Tensor = self.model(
            inputs_embeds=embeds, position_ids=positions_1T, use_cache=False
        ).last_hidden_state
        return states


@pytest.fixture(params=KINDS, ids=str)
def runners(request: pytest.FixtureRequest) -> tuple[DraftWorker, DenseRunner]:
    """Both, with the same texts and features."""
    needs, shift = request.param
    features = [torch.randn(len(text) - 1, H, generator=torch.Generator().manual_seed(len(text))) for text in TEXTS]
    fed = features if needs == "all" else None
    worker = paged_worker(Small(PAGED, shift), TEXTS, fed, k=K, vocab_size=V)
    texts = [Text(list(text), features[slot] if needs == "all" else None) for slot, text in enumerate(TEXTS)]
    dense = DenseRunner(Small(DENSE, shift), texts, torch.zeros(len(TEXTS), K + 1, V))
    return worker, dense


class Asks:
    """A proposer that only asks, of both."""

    def __init__(self, worker: DraftWorker, ask: Any) -> None:
        self.worker, self.ask = worker, ask

    def propose(self, rows: Any) -> list[Any]:
        self.found = self.ask(self.worker)
        return [()] * len(rows)


def assert_same(runners: tuple[DraftWorker, DenseRunner], ask: Any) -> None:
    worker, dense = runners
    asks = Asks(worker, ask)
    with torch.inference_mode():
        worker.propose(asks, ROWS)
        for found, wanted in zip(asks.found, ask(dense), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def beside(runner: Any, count: int, seed: int) -> torch.Tensor | None:
    """What goes in beside drafted tokens, for modules that are fed anything."""
    if not runner.module.shift:
        return None
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed))


def test_chains(runners: tuple[DraftWorker, DenseRunner]) -> None:
    def ask(runner: Any) -> list[torch.Tensor]:
        found = [runner.catch_up(ROWS), runner.newest(ROWS)]
        found += [runner.extend(ROWS, torch.tensor([1, 2, 3]), 0, beside(runner, 3, 1))]
        found += [runner.extend(ROWS[:2], torch.tensor([4, 5]), 1, beside(runner, 2, 2))]
        return found

    assert_same(runners, ask)


def test_trees(runners: tuple[DraftWorker, DenseRunner]) -> None:
    def ask(runner: Any) -> list[torch.Tensor]:
        first = Level(
            torch.tensor([0, 0, 1, 2, 2, 2]),
            torch.tensor([1, 2, 3, 4, 5, 6]),
            torch.full((6,), -1),
            beside(runner, 6, 1),
        )
        second = Level(torch.tensor([0, 2, 2]), torch.tensor([7, 8, 9]), torch.tensor([1, 0, 0]), beside(runner, 3, 2))
        third = Level(torch.tensor([1, 2]), torch.tensor([10, 11]), torch.tensor([0, 4]), beside(runner, 2, 3))
        return [runner.catch_up(ROWS), *(runner.grow(ROWS, level) for level in (first, second, third))]

    assert_same(runners, ask)


@pytest.mark.parametrize("sees_all", [False, True])
def test_blocks(runners: tuple[DraftWorker, DenseRunner], sees_all: bool) -> None:
    def ask(runner: Any) -> list[torch.Tensor]:
        row_N = torch.tensor([0, 0, 0, 2])
        return [*runner.block(ROWS, row_N, torch.tensor([1, 2, 3, 4]), beside(runner, 4, 1), sees_all=sees_all)]

    assert_same(runners, ask)


def test_what_has_no_room_is_refused(runners: tuple[DraftWorker, DenseRunner]) -> None:
    worker, _ = runners
    worker.slots.num_blocks[0] = 1
    ask = Asks(
        worker,
        lambda runner: runner.block(ROWS, torch.zeros(5, dtype=torch.int64), torch.arange(5), None, sees_all=False),
    )
    with pytest.raises(ValueError, match="more than its k allows"):
        worker.propose(ask, ROWS)
