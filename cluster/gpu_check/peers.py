"""Other engines on the same model and prompts, each in a process of its own, where they are installed.

python -m cluster.gpu_check.peers ENGINE FOLDER DEVICE VOCAB BATCH...    # one line of JSON: tokens a second
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cluster.gpu_check.answers import prompts
from cluster.gpu_check.decoding import LONG, PROMPT, SHORT, DecodingSpeed
from cluster.gpu_check.models import SHAPES

TIMEOUT_S = 900.0

Generate = Callable[[list[list[int]], int], object]
"""Generates so many tokens after each prompt."""


def _transformers(folder: str, device: str) -> Generate:
    import torch  # noqa: PLC0415 - each process loads one engine
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()

    def generate(asked: list[list[int]], max_tokens: int) -> object:
        ids_BL = torch.tensor(asked, device=device)
        mask_BL = torch.ones_like(ids_BL)
        length = {"min_new_tokens": max_tokens, "max_new_tokens": max_tokens}
        out_BL = model.generate(ids_BL, attention_mask=mask_BL, do_sample=False, pad_token_id=0, **length)
        return out_BL.tolist()  # waits for the device

    return generate


def _vllm(folder: str, device: str) -> Generate:
    del device
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # noqa: PLC0415

    llm = LLM(folder, skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=False, max_model_len=1024)

    def generate(asked: list[list[int]], max_tokens: int) -> object:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        return llm.generate([{"prompt_token_ids": ids} for ids in asked], sampling, use_tqdm=False)

    return generate


def _sglang(folder: str, device: str) -> Generate:
    del device
    import sglang  # type: ignore[import-not-found]  # noqa: PLC0415

    engine = sglang.Engine(model_path=folder, skip_tokenizer_init=True, dtype="bfloat16", disable_radix_cache=True)

    def generate(asked: list[list[int]], max_tokens: int) -> object:
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        return engine.generate(input_ids=asked, sampling_params=sampling)

    return generate


ENGINES: Mapping[str, Callable[[str, str], Generate]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "sglang": _sglang,
}


def rows(model: str, folder: Path, device: str, batches: list[int]) -> Iterator[DecodingSpeed | str]:
    """Yield a row for each engine that is installed and batch size; or a line that says why there is none."""
    vocab = SHAPES[model].values["vocab_size"]
    for engine in ENGINES:
        if find_spec(engine) is None:
            yield f"{engine} is not installed"
            continue
        command = [sys.executable, "-m", __name__, engine, str(folder), device, str(vocab), *map(str, batches)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            yield f"{engine} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1][:300]}"
            continue
        for batch, rate in json.loads(done.stdout.strip().splitlines()[-1]).items():
            yield DecodingSpeed(model, engine, int(batch), rate)


def _rate(generate: Generate, asked: list[list[int]]) -> float:
    """Return tokens a second of decoding, as `speed` measures them."""
    seconds: dict[int, float] = {}
    generate(asked, SHORT)
    for max_tokens in (SHORT, LONG):
        began = time.perf_counter()
        generate(asked, max_tokens)
        seconds[max_tokens] = time.perf_counter() - began
    return len(asked) * (LONG - SHORT) / (seconds[LONG] - seconds[SHORT])


def main(arguments: list[str]) -> None:
    """Measure one engine."""
    engine, folder, device, vocab, *batches = arguments
    generate = ENGINES[engine](folder, device)
    rates: dict[str, Any] = {}
    for batch in batches:
        rates[batch] = _rate(generate, [list(ids) for ids in prompts(int(batch), PROMPT, int(vocab))])
    sys.stdout.write(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
