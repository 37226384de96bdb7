"""The arguments of the scripts that make quantised checkpoints."""

import argparse
from pathlib import Path


def arguments(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of `--model` and `--into`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", type=Path, help="folder of a model to quantise (default: the package's tiny ones)")
    parser.add_argument("--into", type=Path, help="folder for checkpoints of the model")
    return parser
