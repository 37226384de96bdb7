"""`slipstream check`: run both engines, show what was found, and say whether speculation changes anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

import demo
from cluster.check.check import CheckOptions, examine, rule_of
from cluster.check.engine_run import Tick
from cluster.check.report import Decode, as_json, lines, tables, verdict_line
from cluster.cli.console import ERR, OUT, say, show_warnings
from cluster.cli.generate import PROMPT_FIELDS, read_items
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from runtime.text.tokenizer import load_tokenizer

JSON_LINES = frozenset({".jsonl", ".json"})


def run(config: EngineConfig, wanted: CheckOptions, output: Path | None) -> bool:
    """Check, print the report, write it to *output*; return whether speculation ran and changed nothing.

    Raises:
        ConfigError: something cannot be checked, read or written; before any engine is built.
    """
    rule_of(config)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent} to write {output.name} to")
    show_warnings()
    report = examine(config, wanted, say, _bars)
    for table in tables(report):
        OUT.print(table)
    for line in lines(report, _decoder(config)):
        OUT.print(line, markup=False, highlight=False)
    if output is not None:
        output.write_bytes(as_json(report))
        say(f"the whole report is in {output}")
    OUT.print(verdict_line(report), style="bold", markup=False, highlight=False)
    return report.passed


def read_prompts(path: Path | None, count: int) -> list[Any]:
    """Return up to *count* prompts: of a JSONL file as `slipstream generate` takes it, or of a text file, one a line.

    Without a file, the demo's own. Of a JSONL line only the prompt counts.

    Raises:
        ConfigError: the file cannot be read, or has no prompts.
    """
    path = path or demo.PROMPTS
    if path.suffix in JSON_LINES:
        items: list[Any] = [{key: item[key] for key in PROMPT_FIELDS if key in item} for _, item in read_items(path)]
        return items[:count]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {type(error).__name__}") from None
    texts = [line for line in text.splitlines() if line.strip()]
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
