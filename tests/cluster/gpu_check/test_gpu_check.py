"""`slipstream doctor --gpu`: its models, its verdicts, and the whole check on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.gpu_check import bandwidth
from cluster.gpu_check.answers import assert_same, attempted
from cluster.gpu_check.decoding import PLAIN, DecodingSpeed
from cluster.gpu_check.identity import methods
from cluster.gpu_check.models import FAMILIES, SHAPES, right_share, save_pair, save_tiny
from cluster.gpu_check.report import CheckResult, GpuReport
from cluster.gpu_check.run import GpuCheckOptions, run_stages
from protos.errors import ConfigError


@torch.no_grad()
def successors(folder: Path) -> torch.Tensor:
    """The greedy token after each token of the vocabulary, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logits_V1V = model(torch.arange(model.config.vocab_size)[:, None]).logits
    return logits_V1V[:, 0].argmax(-1)


def test_a_draft_is_right_as_often_as_asked(tmp_path: Path) -> None:
    target, draft = save_pair("tiny", "tiny-draft", 0.75, "cpu", tmp_path)
    target_V, draft_V = successors(target), successors(draft)
    assert len(target_V.unique()) == SHAPES["tiny"].values["vocab_size"]
    assert (target_V == draft_V).float().mean() == 0.75


@pytest.mark.parametrize("k", [1, 5])
def test_of_a_chain_fewer_tokens_are_accepted_than_are_right(k: int) -> None:
    share = right_share(0.8, k)
    assert sum(share**i for i in range(1, k + 1)) / k == pytest.approx(0.8)
    assert share >= 0.8 - 1e-9
    assert right_share(1.0, k) == pytest.approx(1.0)


def test_bytes_of_a_step(tmp_path: Path) -> None:
    target, _ = save_pair("tiny", "tiny-draft", 0.75, "cpu", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(target)
    weights = sum(each.numel() for name, each in model.named_parameters() if "embed_tokens" not in name)
    kv_of_a_token = 2 * 4 * 2 * 32  # keys and values, layers, heads, head size
    assert bandwidth.read_bytes(target, 3, 100) == 2 * weights + 3 * 100 * 2 * kv_of_a_token


def test_bandwidth_is_measured() -> None:
    assert 1e8 < bandwidth.measured("cpu") < 1e13


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_load_in_transformers(family: str, tmp_path: Path) -> None:
    found = successors(save_tiny(family, tmp_path))
    assert len(found.unique()) > 20  # not the same token always


def test_answers_that_differ_are_named() -> None:
    assert_same([(1, 2), (3, 4)], [(1, 2), (3, 4)], "graphs")
    with pytest.raises(AssertionError, match="graphs: answer 1 differs from token 1 on"):
        assert_same([(1, 2), (3, 4)], [(1, 2), (3, 5)], "graphs")


def test_a_check_that_fails_is_told_and_the_others_go_on() -> None:
    def fails() -> str:
        raise ConfigError("no such thing\nat all")

    assert attempted("it", fails) == ("it", False, "ConfigError: no such thing")
    assert attempted("it", lambda: "fine") == ("it", True, "fine")


def test_the_report_states_goals_and_what_was_found(tmp_path: Path) -> None:
    report = GpuReport({"device": "a GPU"}, 3e12, [CheckResult("one", True, "fine")])
    assert report.table() == []
    report.speed += [
        DecodingSpeed("0.6B", PLAIN, 1, 900.0, 0.5),
        DecodingSpeed("8B", PLAIN, 1, 190.0, 0.84),
        DecodingSpeed("8B", "draft 1B, K = 5", 1, 380.0, None, 2.0, 0.8, (1.0, 0.0, 5.25, 0.5)),
    ]
    assert report.goals() == [
        "met: 8B: 0.84 of the bandwidth bound at batch 1, 0.8 wanted",
        "MISSED: 8B: 2.00 times plain decoding at batch 1, 2.5 wanted",
    ]
    assert report.table()[-1] == "| 8B | draft 1B, K = 5 | 1 | 380 |  | 2.00 | 80% | 1.00, 0.00, 5.25, 0.50 |"
    report.write(tmp_path / "results" / "gpu.json")
    written = json.loads((tmp_path / "results" / "gpu.json").read_text())
    assert written["passed"]
    assert written["goals"] == report.goals()
    report.checks.append(CheckResult("two", False, "answer 1 differs"))
    assert not report.passed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ConfigError, match="there is no GPU that torch can use"):
        run_stages(GpuCheckOptions(), print, print)


@pytest.mark.full
@pytest.mark.timeout(0)
def test_the_whole_check_on_a_cpu() -> None:
    said: list[str] = []
    report = run_stages(GpuCheckOptions("cpu"), said.append, print)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert len(report.checks) == len(FAMILIES) + len(methods()) + 2
    assert {row.method for row in report.speed} == {PLAIN, "draft tiny-draft, K = 3"}
    assert not report.notes
