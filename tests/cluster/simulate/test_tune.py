"""`slipstream tune`: which draft and K are chosen, for which reason; and the command on a tiny pair."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml  # type: ignore[import-untyped]

import demo
from cluster.cli import main as cli
from cluster.ray_serve.arguments import ServeArguments
from cluster.settings import engine_config, with_serving_defaults
from cluster.simulate.costs import CostTable, draft_key
from cluster.simulate.predict import SpeedupPrediction
from cluster.simulate.results import Replay
from cluster.simulate.serving import ray_serve_file, serve_file, tuned_arguments
from cluster.simulate.tune import Advice, TunedSize, choose
from protos.config import argument_names
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from tests.support.models import tiny_pairs


def predicted(name: str, k: int, context: int = 64, **speedups: float) -> list[SpeedupPrediction]:
    return [SpeedupPrediction(name, k, (int(rows[1:]), context), 1.0, 1.0, gain) for rows, gain in speedups.items()]


def test_each_batch_size_gets_its_best_number_and_none_where_it_does_not_pay() -> None:
    found = choose(
        [
            *predicted("a", 1, b1=1.2, b4=1.3, b8=0.9, b16=1.5),
            *predicted("a", 3, b1=1.6, b4=1.1, b8=1.01, b16=0.5),
            *predicted("b", 3, b1=1.3, b4=0.5, b8=0.5, b16=0.5),
            *predicted("c", 3, b1=0.7, b4=0.5, b8=0.5, b16=0.5),
        ]
    )
    assert found.name == "a"
    assert [(each.rows, each.k, each.gain) for each in found.choices] == [
        (1, 3, 1.6),
        (4, 1, 1.3),
        (8, 0, 1),
        (16, 0, 1),
    ]
    reasons = [each.reason for each in found.choices]
    assert reasons[0] == "the highest of K = 1: 1.20x, K = 3: 1.60x"
    assert reasons[2] == "off: no K gains 2% (K = 1: 0.90x, K = 3: 1.01x)"
    assert reasons[3] == "off, as at batch size 8 (K = 1: 1.50x, K = 3: 0.50x)"
    # (1.6 * 1.3)^(1/4) and 1.3^(1/4)
    assert found.others == [
        "b: 1.07x on average, a 1.20x",
        "c: does not pay, 0.70x at batch size 1 with its best K, 3",
    ]
    config = found.speculative_config({"method": "ngram"}, 32)
    assert config == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 3, 3], [4, 7, 1], [8, 32, 0]],
    }
    speculative = engine_config({"speculative_config": config}).speculative
    assert speculative is not None
    assert speculative.policy_name == "schedule"


def test_contexts_count_by_their_geometric_mean() -> None:
    found = choose([*predicted("a", 2, 64, b1=2.0), *predicted("a", 2, 512, b1=0.5), *predicted("a", 1, 64, b1=1.1)])
    [choice] = found.choices
    assert (choice.k, choice.gain) == (1, pytest.approx(1.1))  # with K = 2 it is 1.0


def test_where_nothing_pays_there_is_no_configuration() -> None:
    found = choose([*predicted("a", 1, b1=0.9), *predicted("b", 1, b1=1.01)])
    assert found.name is None
    assert found.speculative_config({"method": "ngram"}, 8) is None
    assert [line.split(":")[0] for line in found.others] == ["a", "b"]


def tune(folder: Path, *given: str) -> None:
    target, draft = tiny_pairs.build(folder, "llama")
    options = ["--k", "1,2", "--batch-sizes", "1,2", "--contexts", "8", "--max-tokens", "6", "--num-prompts", "2"]
    engine = ["--dtype", "float32", "--max-model-len", "128", "--num-gpu-blocks-override", "64", "--enforce-eager"]
    drafts = ["--draft", json.dumps({"model": str(draft), "name": "tiny"})]
    prompts = folder / "prompts.txt"
    prompts.write_text("abc\nabcabc\n")
    cli.app(["tune", str(target), *drafts, "--prompts", str(prompts), *options, *engine, *given], standalone_mode=False)


def test_the_command_prints_a_configuration_that_the_engine_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, served, deployed = tmp_path / "speculative.json", tmp_path / "serve.yaml", tmp_path / "deploy.yaml"
    tune(tmp_path, "--output", str(path), "--serve-config", str(served), "--ray-serve-config", str(deployed))
    shown, progress = capsys.readouterr()
    for k in (1, 2):
        assert f"replaying tiny, K = {k}: 2 to do\n" in progress
    for word in ("tiny", "ngram", "suffix", "batch size 2: ", "larger batches were not measured: as at 2"):
        assert word in shown
    found = json.loads(path.read_text())
    assert json.loads(shown.splitlines()[-1]) == found
    config = engine_config({"model": str(tmp_path / "target"), "speculative_config": found})
    assert (config.speculative is None) == ("do not speculate" in shown)
    assert _served(served) == _deployed(deployed)
    assert _served(served).speculative == config.speculative
    assert "batch size 2: " in served.read_text()  # the reasons, as comments


def _served(path: Path) -> EngineConfig:
    """Return the configuration that `slipstream serve --config` makes of a file."""
    command: Any = typer.main.get_command(cli.app).commands["serve"]  # type: ignore[attr-defined]
    context = command.make_context("serve", ["--config", str(path)])
    given = {name: value for name, value in context.params.items() if name in argument_names.NAMES}
    return engine_config(with_serving_defaults({name: value for name, value in given.items() if value is not None}))


def _deployed(path: Path) -> EngineConfig:
    """Return the configuration that Ray Serve's application makes of a file."""
    [application] = yaml.safe_load(path.read_text())["applications"]
    assert (application["import_path"], application["route_prefix"]) == ("cluster.serve:build_app", "/")
    return ServeArguments.model_validate(application["args"]).config


@pytest.mark.parametrize("speculative", [None, {"method": "ngram", "num_speculative_tokens": 2}])
def test_files_for_serving_hold_what_was_tuned(tmp_path: Path, speculative: dict[str, Any] | None) -> None:
    arguments = tuned_arguments({"max_num_seqs": 4, "dtype": None}, str(demo.pair()[0]), speculative)
    served, deployed = tmp_path / "serve.yaml", tmp_path / "deploy.yaml"
    served.write_text(serve_file(arguments, ['a reason: "quoted"']))
    deployed.write_text(ray_serve_file(arguments, []))
    assert _served(served) == _deployed(deployed)
    config = _served(served)
    assert (config.scheduler.max_num_seqs, config.speculative is None) == (4, speculative is None)


def costs(replays: list[Replay], config: EngineConfig, *_: str) -> CostTable:
    """Return made-up costs: rounds cost as much as they have tokens."""
    shape, seconds = (1, 8), {tokens: float(tokens) for tokens in (1, 2, 3)}
    drafts = {draft_key(each.speculative): {shape: {1: 1.0, 2: 2.0}} for each in replays}
    return CostTable(config.model.model, "float32", {}, {"processor": "any"}, {shape: seconds}, drafts)


@pytest.mark.parametrize(
    "policy",
    [
        {"policy": "adaptive"},
        {"disable-by-batch-size": 1},
        {"num_speculative_tokens_per_batch_size": [[1, 64, 2]]},
    ],
)
def test_a_policy_of_a_draft_is_not_in_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: dict[str, Any]
) -> None:
    def first(predictions: list[SpeedupPrediction]) -> Advice:
        return Advice("mine", [TunedSize(1, 2, 1.5, "made up")], [])

    monkeypatch.setattr("cluster.cli.tune.measure_costs", costs)
    monkeypatch.setattr("cluster.cli.tune.choose", first)
    draft = {**policy, "speculative_model": str(tmp_path / "draft"), "name": "mine"}
    written, served = tmp_path / "speculative.json", tmp_path / "serve.yaml"
    tune(tmp_path, "--draft", json.dumps(draft), "--output", str(written), "--serve-config", str(served))
    config = json.loads(written.read_text())
    assert config.keys() == {"model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
    accepted = engine_config({"model": str(tmp_path / "target"), "speculative_config": config}).speculative
    assert accepted is not None
    assert accepted.policy_name == "schedule"
    assert _served(served).speculative == accepted


def test_a_bad_draft_is_not_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tiny draft has random weights."""

    monkeypatch.setattr("cluster.cli.tune.measure_costs", costs)
    tune(tmp_path, "--serve-config", str(tmp_path / "serve.yaml"))
    shown = capsys.readouterr().out
    assert "do not speculate:" in shown
    assert "not tiny: does not pay" in shown
    assert "measured with float32 on processor any" in shown
    assert shown.splitlines()[-1] == "null"
    assert _served(tmp_path / "serve.yaml").speculative is None
    assert "# do not speculate:" in (tmp_path / "serve.yaml").read_text()


@pytest.mark.parametrize("option", ["--output", "--serve-config", "--ray-serve-config"])
def test_files_that_cannot_be_written_are_refused_at_once(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.tune.engine_config", None)
    with pytest.raises(ConfigError, match="cannot be written: it is a folder"):
        tune(tmp_path, option, str(tmp_path))
    with pytest.raises(ConfigError, match=r"prompts\.txt cannot be written: it is read, too"):
        tune(tmp_path, option, str(tmp_path / "prompts.txt"))


def test_two_drafts_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two drafts are called 'suffix': give one of them another `name`"):
        tune(tmp_path, "--draft", '{"method": "suffix"}')
