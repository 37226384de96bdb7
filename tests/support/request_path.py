"""Files that one `LLM.generate` runs through: `python -m tests.support.request_path`.

Counts calls of this repository's functions, by file, between the call and its return, in the calling thread.
The engine is the default one (the demo pair, speculation on), built before counting.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]


def trace(root: Path = ROOT, **arguments: Any) -> Counter[str]:
    """Return how often functions of each file were entered, by the file's path in *root*."""
    from slipstream import LLM, SamplingParams

    entered: Counter[str] = Counter()
    prefix = f"{root}/"

    def profile(frame: FrameType, event: str, argument: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(prefix) and ".venv" not in name:
            entered[name.removeprefix(prefix)] += 1

    params = SamplingParams(max_tokens=16)
    with LLM(enforce_eager=True, **arguments) as llm:
        sys.setprofile(profile)
        llm.generate("def read_lines(path):", params)
        sys.setprofile(None)
    return entered


def main() -> None:
    """Print the files, and how many there are."""
    entered = trace(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    for name, count in sorted(entered.items()):
        print(f"{count:6d}  {name}")
    print(f"{len(entered)} files")


if __name__ == "__main__":
    main()
