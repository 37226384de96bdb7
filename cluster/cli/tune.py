"""`slipstream tune`: measure a target, drafts and this machine, and print the best `speculative_config`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.cli.check import read_prompts
from cluster.cli.console import ERR, OUT, show_progress, show_progress_once, show_warnings
from cluster.cli.simulate import check_names, configs_of, replayed
from cluster.cli.simulate_costs import measure_costs, numbers
from cluster.files import check_outputs
from cluster.llm import LLM
from cluster.settings import engine_config, is_demo
from cluster.simulate import report, serving
from cluster.simulate.costs import CostTable
from cluster.simulate.logs import LoggedAnswer
from cluster.simulate.predict import predict
from cluster.simulate.setup import OF_THE_POLICY, needs_target
from cluster.simulate.tune import Advice, choose
from protos.config import argument_names, speculation
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from protos.sampling import SamplingParams

ALWAYS: tuple[Mapping[str, Any], ...] = (
    {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    {"method": "suffix"},
)
"""Drafts that need nothing, so they are always compared."""


@dataclass(frozen=True)
class TuneOptions:
    """What to compare, over which text; numbers are separated by commas.

    Attributes:
        output: file for the speculative_config, as JSON.
        serve_config, ray_serve_config: files for `slipstream serve --config` and for `serve deploy`.
    """

    drafts: Sequence[str]
    prompts: Path | None
    num_prompts: int
    max_tokens: int
    temperature: float
    ks: str
    batch_sizes: str
    contexts: str
    output: Path | None
    serve_config: Path | None = None
    ray_serve_config: Path | None = None

    def check_files(self) -> None:
        """Raise `ConfigError` if a file could not be written, or is that of the prompts, before anything is loaded."""
        check_outputs((self.output, self.serve_config, self.ray_serve_config), [self.prompts])


def run(engine: Mapping[str, Any], model: str | None, options: TuneOptions) -> None:
    """Generate text, replay all drafts over it, measure costs, and print the best configuration with the reasons.

    Raises:
        ConfigError, ModelError: an option or a checkpoint is wrong.
    """
    show_warnings()
    options.check_files()
    ks = numbers(options.ks, "k")
    numbers(options.batch_sizes, "batch_sizes")
    numbers(options.contexts, "contexts")
    arguments = {**engine, "model": model}
    plain = engine_config({**arguments, argument_names.SPECULATIVE: None})
    drafts = _drafts(options.drafts, plain)
    eager = {"enforce_eager": True, **arguments}
    configs = {name: (keys, [c for _, c in configs_of(eager, keys, ks)]) for name, keys in _named(eager, drafts, ks)}
    prompts = read_prompts(options.prompts, options.num_prompts)
    answers = _generate(engine_config({**eager, argument_names.SPECULATIVE: None}), prompts, options)
    say = show_progress_once()
    replays = [
        replayed(name, config, [answers], say, with_target=needs_target(config))
        for name, (_, several) in configs.items()
        for config in several
    ]
    OUT.print(report.comparison(replays))
    costs = measure_costs(replays, plain, options.batch_sizes, options.contexts)
    predictions = [each for one in replays for each in predict(one, costs)]
    for table in report.speedups(predictions):
        OUT.print(table)
    advice = choose(predictions)
    keys = {} if advice.name is None else _complete(*configs[advice.name])
    found = advice.speculative_config(keys, plain.scheduler.max_num_seqs)
    lines = [*_lines(advice), *_about(costs, options)]
    for line in lines:
        OUT.print(line, markup=False, highlight=False)
    OUT.print(json.dumps(found), markup=False, highlight=False)
    tuned = serving.tuned_arguments(arguments, plain.model.model, found)
    _write(options.output, json.dumps(found) + "\n")
    _write(options.serve_config, serving.serve_file(tuned, lines))
    _write(options.ray_serve_config, serving.ray_serve_file(tuned, lines))


def _complete(keys: Mapping[str, Any], configs: Sequence[EngineConfig]) -> dict[str, Any]:
    """Return the keys of a draft for a configuration: without its name, and with the demo pair's draft where it is."""
    speculative = configs[0].speculative
    assert speculative is not None, "checked by `configs_of`"
    model = {"model": speculative.model} if not {"model", "method"} & keys.keys() else {}
    return {**model, **{key: value for key, value in keys.items() if key != "name"}}


def _about(costs: CostTable, options: TuneOptions) -> list[str]:
    machine = ", ".join(f"{name} {value}" for name, value in costs.machine.items())
    prompts = options.prompts or "the demo's prompts"
    return [f"  measured with {costs.dtype} on {machine}; answers to {prompts} at temperature {options.temperature:g}"]


def _write(path: Path | None, text: str) -> None:
    if path is not None:
        path.write_text(text, encoding="utf-8")
        show_progress(f"wrote {path}")


def _drafts(given: Sequence[str], plain: EngineConfig) -> list[Mapping[str, Any]]:
    """Return the keys of all drafts, without their policies: what is tuned is a table, which no other one reads."""
    several = [speculation.normalised(speculation.mapping(text)) for text in given]
    drafts = [{key: value for key, value in keys.items() if key not in OF_THE_POLICY} for keys in several]
    if not drafts and is_demo(plain):
        drafts = [{}]  # the demo pair's own
    return [*drafts, *ALWAYS]


def _named(
    arguments: Mapping[str, Any], drafts: Sequence[Mapping[str, Any]], ks: Sequence[int] | None
) -> list[tuple[str, Mapping[str, Any]]]:
    """Return each draft with its name. Raises `ConfigError` for two of the same name."""
    named = [(next(configs_of(arguments, keys, ks))[0], keys) for keys in drafts]
    check_names([name for name, _ in named])
    return named


def _generate(plain: EngineConfig, prompts: Sequence[Any], options: TuneOptions) -> list[LoggedAnswer]:
    """Return the target's answers without speculation."""
    params = [
        SamplingParams(temperature=options.temperature, seed=number, max_tokens=options.max_tokens)
        for number in range(len(prompts))
    ]
    with LLM.from_config(plain, show_progress) as llm:
        results = llm.generate(list(prompts), params, use_tqdm=ERR.is_terminal or ERR.is_dumb_terminal)
    answers = [
        LoggedAnswer(
            tuple(result.prompt_token_ids),
            tuple(result.outputs[0].token_ids),
            SamplingParams(temperature=one.temperature, max_tokens=None),
            one.seed,
            one.max_tokens,
            result.outputs[0].finish_reason == "length",
            plain.model.model,
            f"prompt {one.seed}",
            states_temperature=True,
        )
        for result, one in zip(results, params, strict=True)
    ]
    found = [answer for answer in answers if answer.output]
    if not found:
        raise ConfigError(f"the target's answers to the {len(answers)} prompts are empty: give others with --prompts")
    return found


def _lines(advice: Advice) -> list[str]:
    """Return the choices and their reasons."""
    found = ["do not speculate:" if advice.name is None else f"speculate with {advice.name}:"]
    found += [
        f"  batch size {choice.rows}: {f'K = {choice.k}, {choice.gain:.2f}x' if choice.k else 'none'}; {choice.reason}"
        for choice in advice.choices
    ]
    found.append(f"  larger batches were not measured: as at {advice.choices[-1].rows}")
    return [*found, *(f"not {line}" for line in advice.others)]
