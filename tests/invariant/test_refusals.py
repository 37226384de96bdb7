"""Models, operators and machines that `batch_invariant` refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from protos.errors import ConfigError
from tests.support.distributed.ranks import in_memory
from tests.support.models.invariant_model import VOCAB, Model
from tests.support.models.tiny_models import SPECIFIC, build
from workers.invariant import native as invariant_native
from workers.invariant import trace as invariant
from workers.invariant.model import sum_in_order
from workers.native.build import load_function

pytestmark = pytest.mark.usefixtures("one_thread")


def refusal(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    return str(caught.value)


def test_what_has_no_order_of_sums_is_not_split() -> None:
    model = nn.Sequential(nn.LayerNorm(4))
    message = refusal(lambda: in_memory(2, lambda group: sum_in_order(model, "0", group)))
    assert "cannot split 0 (LayerNorm) over ranks" in message
    assert "use tensor_parallel_size=1" in message


def test_ranks_that_cannot_share_the_parts_of_sums(tmp_path: Path) -> None:
    folder = build("llama", tmp_path, num_attention_heads=6, num_key_value_heads=6, hidden_size=48, vocab_size=VOCAB)
    message = refusal(lambda: in_memory(3, lambda group: Model(folder, group=group)))
    assert "8 parts, which 3 ranks cannot share: tensor_parallel_size must be 1, 2, 4 or 8" in message


def test_without_a_compiler_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = build("llama", tmp_path, vocab_size=VOCAB)
    monkeypatch.setattr("shutil.which", lambda _: None)
    for cached in (load_function, invariant_native._function):
        cached.cache_clear()
    message = refusal(lambda: Model(folder))
    for cached in (load_function, invariant_native._function):
        cached.cache_clear()
    assert "there is no C++ compiler; install a C++ compiler or leave batch_invariant out" in message


def test_operators_that_are_not_known_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECIFIC, "llama", {"hidden_act": "mish"})
    message = refusal(lambda: Model(build("llama", tmp_path, vocab_size=VOCAB)))
    assert "(model_type 'llama'): batch_invariant: the model uses aten.mish, whose bits may depend on" in message


@pytest.mark.parametrize(
    "work",
    [
        lambda x: torch.add(x, x, alpha=0.3),
        lambda x: x.index_put_((torch.zeros(3, dtype=torch.int64),), x, accumulate=True),
        lambda x: x.scatter(0, torch.zeros(x.shape, dtype=torch.int64), x, reduce="add"),
        lambda x: x.cumsum(0),
        lambda x: x.sum(),
        lambda x: x.pow(0.3),
        torch.linalg.vector_norm,
        lambda x: x.double().exp(),
        lambda x: x.unsqueeze(0) @ x.unsqueeze(0),
    ],
)
def test_what_could_sum_in_another_order_is_refused(work: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.inference_mode(), invariant.active(), pytest.raises(ConfigError, match="batch_invariant: the model"):
        work(torch.ones(3, 3))


def test_what_is_exact_is_left_alone() -> None:
    x = torch.arange(6.0).view(2, 3)
    with torch.inference_mode(), invariant.active():
        counted = x + x - x * 2 + x.cumsum(0, dtype=torch.int64)
        total, mean = x.sum(1), x.mean(-1, keepdim=True)
    assert counted.tolist() == [[0.0, 1.0, 2.0], [3.0, 5.0, 7.0]]
    assert total.tolist() == [3.0, 12.0]
    assert mean.tolist() == [[1.0], [4.0]]
