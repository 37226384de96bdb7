"""`slipstream check`: run both engines, show what was found, and say whether speculation changes anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

import demo
from cluster import checking, checking_report
from cluster.checking_side import Tick
from cluster.cli_generate import PROMPT_FIELDS, read_items
from cluster.cli_output import ERR, OUT, say, show_warnings
from protos.config import EngineConfig
from protos.errors import ConfigError
from runtime.inputs import load_tokenizer

JSON_LINES = frozenset({".jsonl", ".json"})


def run(config: EngineConfig, wanted: checking.Wanted, output: Path | None) -> bool:
    """Check, print the report, write it to *output*; return whether speculation ran and changed nothing.

    Raises:
        ConfigError: something cannot be checked, read or written; before any engine is built.
    """
    checking.rule_of(config)
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent} to write {output.name} to")
    show_warnings()
    report = checking.examine(config, wanted, say, _bars)
    for table in checking_report.tables(report):
        OUT.print(table)
    for line in checking_report.lines(report, _decoder(config)):
        OUT.print(line, markup=False, highlight=False)
    if output is not None:
        output.write_bytes(checking_report.as_json(report))
        say(f"the whole report is in {output}")
    OUT.print(checking_report.verdict_line(report), style="bold", markup=False, highlight=False)
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
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {type(error).__name__}") from None
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ConfigError(f"{path} has no prompts")
    return texts[:count]


@contextmanager
def _bars(text: str, total: int) -> Iterator[Tick]:
    with Progress(console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)


def _decoder(config: EngineConfig) -> checking_report.Decode:
    tokenizer = None if config.model.skip_tokenizer_init else load_tokenizer(config.model)
    if tokenizer is None:
        return str
    return lambda token: str(tokenizer.decode([token]))
