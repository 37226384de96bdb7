"""Write `workload.json`: prompts from standard library files that the demo models never saw.

    python -m benchmarks.shared.make_workload [--tokenizer FOLDER] [--stdlib FOLDER]

Prompts are stored as text, so that any tokenizer can read them; their lengths hold for the demo's.
"""

import argparse
import ast
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.shared.workload import PATH
from demo.corpus import HELDOUT_LIST

SEED = 20260101
NUM_PROMPTS, PROMPT_TOKENS, OUTPUT_TOKENS = 64, (32, 200), 128
NUM_CONCURRENT, CONCURRENT_TOKENS = 32, (32, 256)
NUM_EDITS, FUNCTION_TOKENS = 24, (64, 256)


def heldout_texts(stdlib: Path) -> dict[str, str]:
    """Return the held-out files that this Python has, by name, in order."""
    names = HELDOUT_LIST.read_text().split()
    return {name: (stdlib / name).read_text(encoding="utf-8") for name in names if (stdlib / name).exists()}


def line_starts(text: str) -> list[int]:
    """Return the offsets at which a line that is not blank begins."""
    offsets, position = [], 0
    for line in text.splitlines(keepends=True):
        if line.strip():
            offsets.append(position)
        position += len(line)
    return offsets


class Cutter:
    """Cuts prompts out of texts, at offsets drawn from *rng*."""

    def __init__(self, texts: dict[str, str], tokenizer: Tokenizer, rng: random.Random) -> None:
        self.texts, self.tokenizer, self.rng = texts, tokenizer, rng

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def candidates(self) -> Iterator[tuple[str, str]]:
        """Yield (name, text from a random line on) without end; all files are equally likely."""
        names = sorted(self.texts)
        while True:
            name = self.rng.choice(names)
            starts = line_starts(self.texts[name])
            if starts:
                yield name, self.texts[name][self.rng.choice(starts) :]

    def whole_lines(self, shortest: int, longest: int) -> tuple[str, str]:
        """Return (name, prompt): as many whole lines as fit a drawn number of tokens."""
        for name, text in self.candidates():
            wanted, prompt = self.rng.randint(shortest, longest), ""
            for line in text.splitlines(keepends=True):
                if self.count(prompt + line) > wanted:
                    break
                prompt += line
            if self.count(prompt) >= shortest:
                return name, prompt
        raise AssertionError("unreachable: candidates never end")

    def exactly(self, wanted: int) -> tuple[str, str]:
        """Return (name, prompt) of exactly *wanted* tokens, which may end inside a line."""
        for name, text in self.candidates():
            encoding = self.tokenizer.encode(text[: 16 * wanted], add_special_tokens=False)
            if len(encoding.ids) > wanted:
                prompt = text[: encoding.offsets[wanted - 1][1]]
                if self.count(prompt) == wanted:
                    return name, prompt
        raise AssertionError("unreachable: candidates never end")


def functions(texts: dict[str, str]) -> list[tuple[str, str, str]]:
    """Return (file, its first line, the rest) of every function and method that a file defines."""
    found = []
    for name, text in sorted(texts.items()):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.body[0].lineno > node.lineno:
                lines = textwrap.dedent(ast.get_source_segment(text, node, padded=True) or "").splitlines(keepends=True)
                head = node.body[0].lineno - node.lineno
                found.append((name, "".join(lines[:head]), "".join(lines[head:])))
    return found


def edits(cutter: Cutter, rng: random.Random) -> list[dict[str, Any]]:
    """Return requests to repeat a function: the prompt is the function, then its first line again."""
    shortest, longest = FUNCTION_TOKENS
    fitting = [
        (name, head, body)
        for name, head, body in functions(cutter.texts)
        if shortest <= cutter.count(head + body) <= longest
    ]
    return [
        {"file": name, "prompt_tokens": cutter.count(prompt), "output_tokens": cutter.count(body), "prompt": prompt}
        for name, head, body in rng.sample(fitting, NUM_EDITS)
        for prompt in [f"{head}{body}\n\n\n{head}"]
    ]


def build(texts: dict[str, str], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the workload as JSON values."""
    rng = random.Random(SEED)
    cutter = Cutter(texts, tokenizer, rng)
    single = [cutter.whole_lines(*PROMPT_TOKENS) for _ in range(NUM_PROMPTS)]
    lengths = [(rng.randint(*CONCURRENT_TOKENS), rng.randint(*CONCURRENT_TOKENS)) for _ in range(NUM_CONCURRENT)]
    concurrent = [(*cutter.exactly(prompt), output) for prompt, output in lengths]
    return {
        "about": "Excerpts of the Python standard library (PSF-2.0) that the demo models were not trained on; "
        f"made by benchmarks/shared/make_workload.py with seed {SEED}. Lengths are in tokens of demo/target.",
        "ignore_eos": True,
        "sampling": {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.7, "top_p": 0.9}},
        "single": [
            {"file": name, "prompt_tokens": cutter.count(text), "output_tokens": OUTPUT_TOKENS, "prompt": text}
            for name, text in single
        ],
        "concurrent": [
            {"file": name, "prompt_tokens": cutter.count(text), "output_tokens": output, "prompt": text}
            for name, text, output in concurrent
        ],
        "editing": edits(cutter, random.Random(SEED + 1)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=PATH.parent.parent / "demo" / "target")
    parser.add_argument("--stdlib", type=Path, default=Path(sysconfig.get_path("stdlib")))
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    workload = build(heldout_texts(args.stdlib), tokenizer)
    PATH.write_text(json.dumps(workload, indent=1) + "\n", encoding="utf-8")
    print(f"{PATH}: {len(workload['single'])} prompts and {len(workload['concurrent'])} concurrent requests")


if __name__ == "__main__":
    main()
