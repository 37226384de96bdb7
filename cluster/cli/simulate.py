"""`slipstream simulate`: replay drafts against logged answers, and print what they would have brought."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import demo
from cluster.cli.console import OUT, progress_bar, show_progress, show_progress_once, show_warnings
from cluster.cli.simulate_costs import CostOptions, numbers
from cluster.files import check_outputs
from cluster.settings import engine_config
from cluster.simulate import charts, report
from cluster.simulate.logs import LogFields, LoggedAnswer, read
from cluster.simulate.predict import SpeedupPrediction, predict
from cluster.simulate.replay import replay
from cluster.simulate.results import Replay
from protos.config import argument_names, speculation
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.progress import ProgressCallback

NUM_TOKENS = "num_speculative_tokens"


@dataclass(frozen=True)
class OutputFiles:
    """Files to write; None for those that are not wanted."""

    matched: Path | None = None
    json: Path | None = None
    html: Path | None = None
    png: Path | None = None

    def check(self, inputs: Sequence[Path]) -> None:
        """Raise `ConfigError` if a file could not be written, or is one of the *inputs*, before anything is loaded."""
        check_outputs((self.matched, self.json, self.html, self.png), inputs)
        if self.png is not None:
            charts.require_matplotlib()


@dataclass(frozen=True)
class SimulateOptions:
    """What to replay.

    Attributes:
        logs: each is a dataset.
        drafts: `speculative_config`s as JSON; empty for that of the engine arguments.
        ks: numbers of draft tokens, separated by commas; None for each draft's own.
        with_target: whether to load the target.
        fields: of the logs.
        num_answers: most answers of each log.
        costs: the table of costs; None for no prediction.
        files: of the results.
    """

    logs: Sequence[Path]
    drafts: Sequence[str]
    ks: str | None
    with_target: bool
    fields: LogFields
    num_answers: int | None
    costs: CostOptions | None
    files: OutputFiles


def run(engine: Mapping[str, Any], options: SimulateOptions) -> None:
    """Replay every draft, print the figures and write the files.

    Args:
        engine: engine arguments.
        options: what to replay.

    Raises:
        ConfigError: a log, a draft, a table or a file is wrong.
        ModelError: a checkpoint cannot be loaded.
    """
    show_warnings()
    options.files.check([*options.logs, *([] if options.costs is None else [options.costs.path])])
    if options.costs is not None:
        options.costs.check(with_target=options.with_target)
    datasets = [read(path, options.fields, options.num_answers) for path in options.logs]
    arguments = {**engine, **_model(engine, datasets)}
    eager = {"enforce_eager": True, **arguments}
    several = [list(configs_of(eager, draft, numbers(options.ks, "k"))) for draft in _drafts(options.drafts, engine)]
    check_names([each[0][0] for each in several])
    configs = [pair for each in several for pair in each]
    _show_assumptions(datasets)
    say = show_progress_once()
    replays = [replayed(name, config, datasets, say, with_target=options.with_target) for name, config in configs]
    _show(replays)
    if options.costs is None:
        _write(replays, [], [], options.files)
        return
    costs, notes = options.costs.table(replays, _for_costs(arguments, configs[0][1]))
    predictions = [each for one in replays for each in predict(one, costs)]
    for table in report.speedups(predictions):
        OUT.print(table)
    notes = [*report.advice(predictions), *notes]
    for line in notes:
        OUT.print(line, markup=False, highlight=False)
    _write(replays, predictions, notes, options.files)


def _for_costs(arguments: Mapping[str, Any], replayed: EngineConfig) -> EngineConfig:
    """Return the configuration whose costs count: that of serving, compiled unless the user says otherwise."""
    compiled = engine_config({**arguments, argument_names.SPECULATIVE: None}).model
    return replace(replayed, model=compiled)


def _model(engine: Mapping[str, Any], datasets: Sequence[Sequence[LoggedAnswer]]) -> dict[str, Any]:
    """Return the argument that names the target: the one given, or the log's."""
    logged = sorted({answer.model for answers in datasets for answer in answers if answer.model})
    given = engine.get("model")
    if given is not None:
        others = [name for name in logged if name != given]
        if others:
            show_progress(f"the answers were logged from {', '.join(others)}; they are replayed as {given}'s")
        return {}
    if not logged:
        raise ConfigError("the log does not name the target: give --model")
    if len(logged) > 1:
        raise ConfigError(f"the logs name several targets, {', '.join(logged)}: replay them one by one")
    # Without a model, engine arguments mean the demo pair, and its draft.
    return {} if logged[0] == str(demo.pair()[0]) else {"model": logged[0]}


def _drafts(given: Sequence[str], engine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the drafts, by default that of the engine arguments, which is empty for the demo pair's own."""
    if not given:
        return [speculation.mapping(engine.get(argument_names.SPECULATIVE))]
    found = [speculation.mapping(text) for text in given]
    if not all(found):
        raise ConfigError("a draft must be a JSON object that names a method or a model, got none")
    return found


def check_names(names: Sequence[str]) -> None:
    """Raise `ConfigError` for two drafts of the same name."""
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two drafts are called {twice!r}: give one of them another `name`")


def configs_of(
    arguments: Mapping[str, Any], draft: Mapping[str, Any], ks: Sequence[int] | None
) -> Iterator[tuple[str, EngineConfig]]:
    """Yield a name and a configuration for each number of draft tokens."""
    keys = {key: value for key, value in draft.items() if key != "name"}
    for wanted in [keys] if ks is None else [{**keys, NUM_TOKENS: k} for k in ks]:
        config = engine_config({**arguments, argument_names.SPECULATIVE: wanted} if wanted else arguments)
        if config.speculative is None:
            raise ConfigError("there is nothing to replay: give --draft, a speculative_config as JSON")
        name = "+".join(config.speculative.methods)
        if config.speculative.model is not None:
            name += f" {Path(config.speculative.model).name}"
        yield str(draft.get("name") or name), config


def _show_assumptions(datasets: Sequence[Sequence[LoggedAnswer]]) -> None:
    answers = [answer for each in datasets for answer in each]
    silent = sum(not answer.states_temperature for answer in answers)
    if silent:
        show_progress(f"{silent} of {len(answers)} answers do not say how they were sampled: taken as greedy")
    texts = sum(isinstance(answer.output, str) for answer in answers)
    if texts:
        show_progress(
            f"{texts} of {len(answers)} answers are text: their tokens are those of the tokenizer, which may differ "
            "from those that were sampled"
        )


def replayed(
    name: str,
    config: EngineConfig,
    datasets: Sequence[Sequence[LoggedAnswer]],
    say: ProgressCallback,
    *,
    with_target: bool,
) -> Replay:
    """Replay one draft behind a progress bar; *say* gets a line for each stage of loading."""
    with progress_bar(f"replaying {name}, K = {config.max_draft}", sum(map(len, datasets))) as tick:
        return replay(name, config, datasets, say, tick, with_target=with_target)


def _show(replays: Sequence[Replay]) -> None:
    for each in replays:
        for line in report.lines(each):
            OUT.print(line, markup=False, highlight=False)
    if len(replays) > 1:
        OUT.print(report.comparison(replays))


def _write(
    replays: Sequence[Replay], predictions: Sequence[SpeedupPrediction], notes: Sequence[str], files: OutputFiles
) -> None:
    if files.matched is not None:
        lines = report.matched_lines(replays)
        _write_text(files.matched, "".join(f"{line}\n" for line in lines))
    if files.json is not None:
        content = {
            "replays": [report.as_dict(each) for each in replays],
            "predictions": [asdict(each) for each in predictions],
            "notes": list(notes),
        }
        _write_text(files.json, json.dumps(content, indent=1) + "\n")
    found = charts.charts(replays, predictions)
    if files.html is not None:
        _write_text(files.html, charts.html(found, replays, [*_rules(replays), *notes]))
    if files.png is not None:
        charts.write_png(found, files.png)
        show_progress(f"wrote {files.png}")


def _rules(replays: Sequence[Replay]) -> list[str]:
    return list(dict.fromkeys(rule for each in replays for rule in each.rules))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    show_progress(f"wrote {path}")
