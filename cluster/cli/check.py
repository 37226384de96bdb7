"""`slipstream check`: run both engines and print the report."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

import demo
from cluster.check.check import CheckOptions, examine, rule_of
from cluster.check.engine_run import Tick
from cluster.check.report import Decode, as_json, lines, tables, verdict_line
from cluster.cli.console import ERR, OUT, show_progress, show_warnings
from cluster.cli.generate import PROMPT_FIELDS, read_items
from cluster.files import check_outputs, read_lines
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from runtime.text.tokenizer import load_tokenizer

JSON_LINES = frozenset({".jsonl", ".json"})


def run(config: EngineConfig, options: CheckOptions, output: Path | None, prompts: Path | None = None) -> bool:
    """Check, print the report and write it to *output*; return whether the check passed. *prompts* were read.

    Raises:
        ConfigError: the configuration cannot be checked, or *output* cannot be written; before an engine is built.
    """
    rule_of(config)
    check_outputs([output], [prompts])
    show_warnings()
    report = examine(config, options, show_progress, _bars)
    for table in tables(report):
        OUT.print(table)
    for line in lines(report, _decoder(config)):
        OUT.print(line, markup=False, highlight=False)
    if output is not None:
        output.write_bytes(as_json(report))
        show_progress(f"the full report is in {output}")
    OUT.print(verdict_line(report), style="bold", markup=False, highlight=False)
    return report.passed


def read_prompts(path: Path | None, count: int) -> list[Any]:
    """Return up to *count* prompts from a JSONL file (as for `slipstream generate`) or a text file, one per line.

    Without a file, return the demo's prompts. Of a JSONL object only the prompt is used.

    Raises:
        ConfigError: the file cannot be read, or has no prompts.
    """
    path = path or demo.PROMPTS
    if path.suffix in JSON_LINES:
        items: list[Any] = [{key: item[key] for key in PROMPT_FIELDS if key in item} for _, item in read_items(path)]
        return items[:count]
    texts = [line for _, line in read_lines(path)]
    if not texts:
        raise ConfigError(f"{path} has no prompts")
    return texts[:count]


@contextmanager
def _bars(text: str, total: int) -> Iterator[Tick]:
    with Progress(console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)


def _decoder(config: EngineConfig) -> Decode:
    tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(config.model)
    if tokenizer is None:
        return str
    return lambda token: str(tokenizer.decode([token]))
