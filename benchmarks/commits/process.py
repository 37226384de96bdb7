"""Engines of one checkout, which may be of an earlier commit: run as a script with its folder in `PYTHONPATH`.

Commands and answers are lines of JSON. Imports what earlier commits have, too.
"""

import json
import sys
import time
from typing import Any

import slipstream
from benchmarks.shared.sides import ForwardClock
from slipstream import LLM, SamplingParams

Command = dict[str, Any]


def generate(engine: LLM, command: Command) -> Command:
    """Return the number of tokens that all rows of *command* got, the seconds, and those outside model forwards."""
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    params = SamplingParams(temperature=0.0, max_tokens=command["tokens"], ignore_eos=True, detokenize=False)
    clock = ForwardClock()
    with clock.running():
        began = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
    tokens = sum(len(one.outputs[0].token_ids) for one in outputs)
    return {"tokens": tokens, "seconds": seconds, "outside": seconds - clock.seconds}


def main() -> None:
    """Load the engines that the first argument describes by name, then answer each command with a line."""
    engines = {
        name: LLM(
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 28,
            skip_tokenizer_init=True,
            disable_log_stats=True,
            device="cpu",
            **options,
        )
        for name, options in json.loads(sys.argv[1]).items()
    }
    print(json.dumps(slipstream.__file__), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(generate(engines[command["engine"]], command)), flush=True)


if __name__ == "__main__":
    main()
