"""`slipstream bench compare`: parse the methods, check everything that needs no weights, compare, and report."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster import assemble
from cluster.bench import compare_report
from cluster.bench.compare import WARM_PROMPT, WARM_TOKENS, CompareOptions, Questioning, compare
from cluster.bench.compared import ComparedMethod
from cluster.bench.prompting import GROWTH, QuestionPrompts
from cluster.bench.questions import Question, read_questions
from cluster.check.check import at_every_batch_size, rule_of
from cluster.cli.console import OUT, progress_bar, show_progress, show_warnings
from cluster.cli.simulate import NUM_TOKENS, check_names, configs_of
from cluster.files import check_outputs
from cluster.settings import engine_config, is_demo
from cluster.simulate import charts
from proposers import registry
from protos.config import argument_names, method, speculation
from protos.config.engine import MAX_SPECULATIVE_TOKENS, EngineConfig
from protos.errors import ConfigError
from protos.validation import did_you_mean, shown
from runtime.text.tokenizer import Tokenizer, load_tokenizer

PLOTS = (".html", ".png")


@dataclass(frozen=True)
class CompareCommand:
    """What to compare on which questions.

    Attributes:
        methods: see `named_methods`.
        dataset: see `read_questions`.
        uses_template: None: where the target has a chat template, the demo's left out, which does not chat.
        num_speculative_tokens: of methods that do not state it; None for each method's default.
        output: JSON to write.
        plot: page or picture to write.
    """

    methods: Sequence[str]
    dataset: Path
    num_prompts: int
    max_turns: int
    options: CompareOptions
    uses_template: bool | None = None
    num_speculative_tokens: int | None = None
    output: Path | None = None
    plot: Path | None = None

    def check(self) -> None:
        """Raise `ConfigError` if a file could not be written, or is that of the questions."""
        check_outputs((self.output, self.plot), [self.dataset])
        if self.plot is not None and self.plot.suffix not in PLOTS:
            raise ConfigError(f"plot must be a {' or '.join(PLOTS)} file, got {self.plot}")
        if self.plot is not None and self.plot.suffix == ".png":
            charts.require_matplotlib()


def run(engine: Mapping[str, Any], command: CompareCommand) -> bool:
    """Compare, print the tables and write the files; return whether all answers are those of plain decoding.

    Raises:
        ConfigError: an option, a method or a question is wrong; before weights are loaded.
        ModelError: a checkpoint cannot be loaded, or a draft has another tokenizer.
    """
    show_warnings()
    command.check()
    model = engine.get("model")
    if model in registry.names() and not Path(model).is_dir():
        raise ConfigError(f"the model is given as {model!r}, which is a method: separate methods by commas")
    questions = read_questions(command.dataset, command.num_prompts, command.max_turns)
    plain = engine_config({**engine, argument_names.SPECULATIVE: None})
    methods = _configs(engine, command)
    tokenizer = load_tokenizer(plain.model)
    for config in methods.values():
        assemble.check_vocabularies(config, tokenizer)
    what, notes = _questioning(questions, plain, tokenizer, command)
    sized = {name: _sized(config, what) for name, config in methods.items()}
    found = compare(_sized(plain, what), sized, what, show_progress, progress_bar)
    notes = [_setting(plain, what), *notes]
    for line in (*compare_report.lines(found), *notes):
        OUT.print(line, markup=False, highlight=False)
    _write(command, found, notes)
    return all(each.passed for each in found)


def named_methods(given: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield each method as keys of a `speculative_config`, with a `name` where one is given.

    Each of *given* is a JSON object, `NAME=JSON`, or a list, separated by commas, of names of methods, of drafts'
    folders or Hub ids, and of `NAME=` one of these.

    Raises:
        ConfigError: one is none of these.
    """
    for text in given:
        name, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            yield _object(text)
        elif equals and value.lstrip().startswith("{"):
            yield {**_object(value), "name": name.strip()}
        else:
            yield from (_of_word(word.strip()) for word in text.split(","))


def _object(text: str) -> Mapping[str, Any]:
    keys = speculation.mapping(text)
    if not keys.keys() - {"name"}:
        raise ConfigError(f"a method must be a JSON object that names a method or a model, got {shown(text)}")
    return keys


def _of_word(word: str) -> Mapping[str, Any]:
    """Return the keys for a method's name, or for a draft's folder or Hub id; `NAME=` before either names it."""
    name, equals, value = word.partition("=")
    if equals and not Path(word).exists():
        return {**_of_word(value.strip()), "name": name.strip()}
    if "/" in word or (word and Path(word).is_dir()):
        return {"model": word}
    known = {*registry.names(), *method.METHOD_ALIASES, speculation.AUTO}
    if not method.is_import_path(word) and method.method_name(word) not in known:
        raise ConfigError(
            f"method {word!r} is neither a method, a folder, nor a Hub id{did_you_mean(word, known)}; methods are "
            f"{', '.join(registry.names())}"
        )
    return {"method": word}


def _configs(engine: Mapping[str, Any], command: CompareCommand) -> dict[str, EngineConfig]:
    """Return the configuration of each method by name. Raises `ConfigError` for one that cannot be compared."""
    default = {} if command.num_speculative_tokens is None else {NUM_TOKENS: command.num_speculative_tokens}
    pairs = [pair for keys in named_methods(command.methods) for pair in configs_of(engine, {**default, **keys}, None)]
    if not pairs:
        raise ConfigError("there is nothing to compare: give --methods")
    check_names([name for name, _ in pairs])
    if compare_report.PLAIN in dict(pairs):
        raise ConfigError(f"{compare_report.PLAIN!r} is plain decoding, which is always compared: give another `name`")
    found = {}
    for name, config in pairs:
        rule_of(config)
        assert config.speculative is not None, "checked by `rule_of`"
        found[name] = at_every_batch_size(config, config.speculative)
    return found


def _questioning(
    questions: Sequence[Question], plain: EngineConfig, tokenizer: Tokenizer | None, command: CompareCommand
) -> tuple[Questioning, list[str]]:
    """Return what is asked, and a note if some questions are left out.

    Raises:
        ConfigError: a question cannot be a prompt, or none fits the context.
    """
    from workers.model.loader import context_length  # noqa: PLC0415 - loads torch, which wrong options need not do
    from workers.weights.hub import read_config  # noqa: PLC0415

    described = read_config(plain.model)
    longest, options = context_length(described, plain.model), replace(command.options, seed=plain.seed or 0)
    uses_template = command.uses_template
    if uses_template is None:
        uses_template = tokenizer is not None and bool(tokenizer.chat_template) and not is_demo(plain)
    prompts = QuestionPrompts(tokenizer, described.get("vocab_size"), uses_template=uses_template)
    sizes = [prompts.most_tokens(question, options.max_tokens) for question in questions]
    fitting = [question for question, size in zip(questions, sizes, strict=True) if size <= longest]
    limit = f"the context of {longest} tokens with answers of {options.max_tokens}"
    if not fitting:
        raise ConfigError(
            f"no question of {command.dataset} fits {limit}: the shortest needs {min(sizes)}; lower --max-tokens"
        )
    roomy = max(prompts.most_tokens(question, options.max_tokens, growth=GROWTH) for question in fitting)
    left_out = len(questions) - len(fitting)
    notes = [f"{left_out} of {len(questions)} questions do not fit {limit} and were left out"] if left_out else []
    return Questioning(fitting, prompts, options, min(longest, roomy)), notes


def _sized(config: EngineConfig, what: Questioning) -> EngineConfig:
    """Return *config* with room for one block of questions: by default an engine takes all the memory of a device."""
    batch_size, cache = what.options.batch_size, config.cache
    scheduler = replace(config.scheduler, max_num_seqs=batch_size)
    if cache.num_blocks is None and cache.memory_bytes is None:
        tokens = max(what.context, 2 * WARM_PROMPT + WARM_TOKENS) + MAX_SPECULATIVE_TOKENS
        cache = replace(cache, num_blocks=1 + batch_size * -(-tokens // cache.block_size))
    return replace(config, scheduler=scheduler, cache=cache)


def _setting(plain: EngineConfig, what: Questioning) -> str:
    options = what.options
    sampling = f"temperature {options.temperature:g}" if options.temperature else "greedy"
    return (
        f"{len(what.questions)} questions of {what.num_turns} turns in {len(what.blocks)} blocks; batch size "
        f"{options.batch_size}, {sampling}, answers of {'' if options.ignore_eos else 'up to '}{options.max_tokens} "
        f"tokens; {plain.model.model}"
    )


def _write(command: CompareCommand, found: Sequence[ComparedMethod], notes: Sequence[str]) -> None:
    if command.output is not None:
        from cluster.simulate.measure import machine  # noqa: PLC0415 - loads torch, as the engines have

        setting = {"dataset": str(command.dataset), "machine": machine(), "notes": list(notes)}
        content = {**setting, **compare_report.as_dict(found)}
        command.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        show_progress(f"wrote {command.output}")
    if command.plot is None:
        return
    chart = compare_report.chart(found)
    if command.plot.suffix == ".png":
        charts.write_png([chart], command.plot)
    else:
        tables = [compare_report.speedups(found), compare_report.accepted(found)]
        page = charts.page("Comparison of methods", [chart], tables, notes)
        command.plot.write_text(page, encoding="utf-8")
    show_progress(f"wrote {command.plot}")
