"""Texts of which more or less can be predicted, and a draft that predicts nothing."""

import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer

from benchmarks.shared import workload
from benchmarks.shared.workload import Item, SamplingSettings
from demo import pair
from demo.train import new_draft

DEMO, HEADERS, RANDOM, MIXED = "demo prompts", "C headers", "random tokens", "mixed"
UNPREDICTABLE = SamplingSettings(1.2)
"""The temperature at which fewest draft tokens are right. At higher ones both models' distributions are flat, and the
noise that they share decides."""
PROMPT_TOKENS, NUM_RANDOM, SEED = 48, 128, 0


def prompts(target: Path) -> dict[str, list[tuple[int, ...]]]:
    """Return the prompts of each text, as ids."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    headers = sorted(Path(sysconfig.get_path("include")).rglob("*.h"))
    encoded = tokenizer.encode_batch([path.read_text(errors="replace") for path in headers], add_special_tokens=False)
    generator = torch.Generator().manual_seed(SEED)
    random = torch.randint(tokenizer.get_vocab_size(), (NUM_RANDOM, PROMPT_TOKENS), generator=generator).tolist()
    work = workload.load(target)
    return {
        DEMO: [item.prompt for item in (*work.single, *work.concurrent)],
        HEADERS: [tuple(one.ids[:PROMPT_TOKENS]) for one in encoded if len(one.ids) >= PROMPT_TOKENS],
        RANDOM: [tuple(row) for row in random],
    }


def requests(target: Path, num_tokens: int) -> dict[str, list[Item]]:
    """Return requests of each text for *num_tokens* tokens.

    Of "mixed", every other one is predictable: the demo's prompts. The others are random tokens, which go on at random.
    """
    items = {name: [Item(ids, num_tokens) for ids in each] for name, each in prompts(target).items()}
    pairs = zip(items[DEMO], unpredictable(items[RANDOM]), strict=False)
    return items | {MIXED: [item for pair_ in pairs for item in pair_]}


def unpredictable(items: list[Item]) -> list[Item]:
    """Return *items* with a temperature at which drafts are wrong."""
    return [Item(item.prompt, item.max_tokens, UNPREDICTABLE) for item in items]


def random_draft(folder: Path) -> Path:
    """Write a draft of the demo's shape with random weights, and its tokenizer, into *folder*."""
    torch.manual_seed(SEED)
    model = new_draft(pair()[0])
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((pair()[1] / name).read_bytes())
    return folder
