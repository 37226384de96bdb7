"""The same tokens as `transformers`, with and without graphs, with and without each method of speculation, in fp32."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from cluster.gpu_check.answers import OFF, Check, Ids, answered, arguments, assert_same, prompts
from cluster.gpu_check.models import FAMILIES, TINY, save_tiny
from demo import PROMPTS, head, pair
from protos.progress import ProgressCallback

COUNT, LENGTH, MAX_TOKENS, SEEDED = 4, 40, 48, 0.8
CHAINS = {"medusa": 4, "hydra": 1, "mlp_speculator": 4, "recurrent": 4, "eagle": 3, "eagle3": 3}
TREES = {"medusa": 16, "recurrent": 16, "eagle": 12, "eagle3": 12}


def checks(device: str, folder: Path, report: ProgressCallback) -> Iterator[Check]:
    """Yield each check's name and what runs it; it raises `AssertionError` if tokens differ."""
    for family in FAMILIES:
        yield f"transformers, {family}", lambda family=family: _family(family, device, folder, report)  # type: ignore[misc]
    target, asked = pair()[0], demo_prompts()
    plain: dict[float, list[tuple[int, ...]]] = {}
    for name, speculative in methods().items():
        yield (
            f"on and off, {name}",
            lambda speculative=speculative: _method(  # type: ignore[misc]
                arguments(device, model=str(target)), speculative, asked, plain, report
            ),
        )


def methods() -> Mapping[str, dict[str, Any]]:
    """Return the `speculative_config` of each method, for the demo's target."""
    draft = {"model": str(pair()[1]), "placement": "colocated"}
    given = {
        "draft_model": {**draft, "num_speculative_tokens": 4},
        "draft_model, tree": {**draft, "num_speculative_tokens": 8, "draft_shape": "tree"},
        "ngram": {"method": "ngram", "num_speculative_tokens": 8},
        "suffix": {"method": "suffix", "num_speculative_tokens": 8},
        "lookahead": {"method": "lookahead", "num_speculative_tokens": 24},
        "self_window": {"method": "self_window", "num_speculative_tokens": 3, "draft_kv_window": 16},
    }
    chains = {name: _head(name, k, "chain") for name, k in CHAINS.items()}
    trees = {f"{name}, tree": _head(name, k, "tree") for name, k in TREES.items()}
    return {name: {**each, "policy": "fixed"} for name, each in {**given, **chains, **trees}.items()}


def _head(name: str, k: int, shape: str) -> dict[str, Any]:
    return {"method": name, "model": str(head(name)), "num_speculative_tokens": k, "draft_shape": shape}


def demo_prompts() -> list[tuple[int, ...]]:
    """Return prompts of the demo, as ids."""
    tokenizer = Tokenizer.from_file(str(pair()[0] / "tokenizer.json"))
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[:COUNT]
    return [tuple(tokenizer.encode(json.loads(line)["prompt"], add_special_tokens=False).ids) for line in lines]


def _family(family: str, device: str, folder: Path, report: ProgressCallback) -> str:
    target = save_tiny(family, folder / family)
    asked = prompts(COUNT, LENGTH, TINY["vocab_size"])
    expected = of_transformers(target, device, asked)
    given = arguments(device, model=str(target))
    itself = {"model": str(target), "num_speculative_tokens": 3, "placement": "colocated", "policy": "fixed"}
    sides = {
        "graphs": OFF,
        "eager": {**OFF, "enforce_eager": True},
        "draft": {"speculative_config": itself},
        "tree": {"speculative_config": {**itself, "num_speculative_tokens": 8, "draft_shape": "tree"}},
    }
    for side, more in sides.items():
        tokens, _ = answered({**given, **more}, asked, MAX_TOKENS, 0.0, report)
        assert_same(tokens, expected, side)
    return f"{len(sides)} engines give the tokens of `generate` for {COUNT} prompts"


def of_transformers(folder: Path, device: str, asked: Sequence[Ids]) -> list[tuple[int, ...]]:
    """Return the greedy tokens of `generate` in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    ids_BL = torch.tensor(asked, device=device)
    out_BL = model.generate(
        ids_BL,
        attention_mask=torch.ones_like(ids_BL),
        do_sample=False,
        max_new_tokens=MAX_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return [tuple(row) for row in out_BL[:, ids_BL.shape[1] :].tolist()]


def _method(
    given: dict[str, Any],
    speculative: dict[str, Any],
    asked: Sequence[Ids],
    plain: dict[float, list[tuple[int, ...]]],
    report: ProgressCallback,
) -> str:
    shares = []
    for temperature in (0.0, SEEDED):
        if temperature not in plain:
            plain[temperature], _ = answered({**given, **OFF}, asked, MAX_TOKENS, temperature, report)
        on, share = answered({**given, "speculative_config": speculative}, asked, MAX_TOKENS, temperature, report)
        assert_same(on, plain[temperature], f"temperature {temperature:g}")
        shares.append("none" if share is None else f"{share:.0%}")
    return f"equal, greedy and seeded; of the draft tokens {shares[0]} and {shares[1]} were accepted"
