"""`slipstream build-datastore`: build the datastore of method `rest` from text files."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import demo
from cluster.cli.console import ERR, show_progress, show_warnings
from cluster.files import UTF8, check_outputs
from proposers.shared import datastore
from protos.config.engine import ModelConfig
from protos.errors import ConfigError
from runtime.text.tokenizer import Tokenizer, load_tokenizer

SORT_STEPS = datastore.DEPTH.bit_length()


def run(model: ModelConfig, sources: Sequence[Path], output: Path) -> None:
    """Tokenise all text files in *sources*, files or folders, and write *output*.

    Raises:
        ConfigError: there are no files, or *output* cannot be written, or is one of them.
        ModelError: the tokenizer cannot be loaded.
    """
    show_warnings()
    files = files_in(sources)
    check_outputs([output], files)
    tokenizer = load_tokenizer(model)
    if tokenizer is None:
        raise ConfigError("a datastore holds tokens: the model must have a tokenizer")
    with _progress() as progress:
        reading = progress.add_task("reading", total=len(files))
        texts = []
        for text in _texts(files):
            progress.advance(reading)
            if text:
                texts.append(tokenizer.encode(text, add_special_tokens=False, verbose=False))
        sorting = progress.add_task("sorting", total=SORT_STEPS)
        count = _write(output, texts, tokenizer, lambda done: progress.update(sorting, completed=done))
    show_progress(f"{output}: {count} tokens of {len(texts)} texts, {output.stat().st_size / 2**20:.1f} MiB")


def demo_model() -> str:
    """Return the folder of the embedded demo target."""
    return str(demo.pair()[0])


def files_in(sources: Sequence[Path]) -> list[Path]:
    """Return all files in *sources*; those of folders recursively, in order, without hidden ones.

    Raises:
        ConfigError: a source does not exist, or there are no files.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file())
            found += [path for path in inside if not _is_hidden(path.relative_to(source))]
        elif source.is_file():
            found.append(source)
        else:
            raise ConfigError(f"{source} is neither a file nor a folder")
    if not found:
        raise ConfigError(f"there are no files in {', '.join(map(str, sources))}")
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _texts(files: Sequence[Path]) -> Iterator[str]:
    """Yield the text of each file; "" for a file that is not text, which is reported."""
    for path in files:
        try:
            yield path.read_text(encoding=UTF8)
        except (OSError, UnicodeDecodeError) as error:
            show_progress(f"skipping {path}: {type(error).__name__}")
            yield ""


def _write(output: Path, texts: list[list[int]], tokenizer: Tokenizer, step: datastore.Step) -> int:
    try:
        return datastore.write(output, texts, datastore.fingerprint(tokenizer.get_vocab()), step)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error}") from None


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=ERR, disable=not ERR.is_terminal)
