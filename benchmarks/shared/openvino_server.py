"""OpenVINO GenAI as a process: commands and answers are lines of JSON. Run by the Python of its own environment.

python -I openvino_server.py '{"models": ..., "threads": 2, "dtype": "bf16", ...}'

It imports nothing of Slipstream, which is not installed there. `-I` keeps this folder off the path, whose modules could
hide those of the environment. It first exports the checkpoints, then says "ready". A command names a side and its
requests, `[prompt ids, number of tokens]` each; the answer has the ids that were generated.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

Request = tuple[Sequence[int], int]
Answer = list[list[int]]
Run = Callable[[Sequence[Request]], Answer]

STEP_TOKENS = 4096
"""Tokens in one forward at most: no prompt is cut."""


def export(checkpoint: str, folder: str) -> None:
    """Write an OpenVINO model with fp16 weights: bf16 is not offered, and fp16 has more bits but for tiny weights."""
    task = ["--task", "text-generation-with-past", "--weight-format", "fp16"]
    program = [sys.executable, "-I", "-W", "ignore", "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    subprocess.run([*program, "--model", checkpoint, *task, folder], check=True)


class Pipelines:
    """One pipeline for each side, without prefix caching: prompts are repeated.

    Keys and values are stored in the dtype that is computed in; OpenVINO's default would be 8-bit integers.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        import openvino_genai as genai  # type: ignore[import-not-found]  # noqa: PLC0415

        self._genai, self._config = genai, config
        self._target, self._draft = config["models"]["target"]["model"], config["models"]["draft"]["model"]
        self._properties = {
            "INFERENCE_NUM_THREADS": config["threads"],
            "INFERENCE_PRECISION_HINT": config["dtype"],
            "KV_CACHE_PRECISION": config["dtype"],
        }
        drafts = config["num_draft_tokens"]
        draft = genai.draft_model(self._draft, "CPU", **self._properties)
        self.sides: dict[str, Run] = {
            "plain": self._one_by_one({}, self._paged()),
            "stateful": self._one_by_one({}, {"ATTENTION_BACKEND": "SDPA"}),
            "draft_model": self._one_by_one(
                {"num_assistant_tokens": drafts["draft_model"]}, self._paged(draft_model=draft)
            ),
            "ngram": self._one_by_one(
                {"num_assistant_tokens": drafts["ngram"], "max_ngram_size": config["max_ngram_size"]},
                self._paged(prompt_lookup=True),
            ),
            "concurrent": self._at_once(),
        }

    def _paged(self, **options: Any) -> dict[str, Any]:
        return {"scheduler_config": self._scheduler(), **options}

    def _scheduler(self) -> Any:
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = 1  # GB
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = STEP_TOKENS
        return scheduler

    def _settings(self, max_tokens: int, options: Mapping[str, Any]) -> Any:
        return self._genai.GenerationConfig(
            max_new_tokens=max_tokens, ignore_eos=True, do_sample=False, apply_chat_template=False, **options
        )

    def _one_by_one(self, settings: Mapping[str, Any], options: Mapping[str, Any]) -> Run:
        pipeline = self._genai.LLMPipeline(self._target, "CPU", **options, **self._properties)

        def run(requests: Sequence[Request]) -> Answer:
            return [
                list(pipeline.generate(_ids(prompt), self._settings(tokens, settings)).tokens[0])
                for prompt, tokens in requests
            ]

        return run

    def _at_once(self) -> Run:
        pipeline = self._genai.ContinuousBatchingPipeline(self._target, self._scheduler(), "CPU", self._properties)

        def run(requests: Sequence[Request]) -> Answer:
            settings = [self._settings(tokens, {}) for _, tokens in requests]
            results = pipeline.generate([_ids(prompt) for prompt, _ in requests], settings)
            return [list(result.m_generation_ids[0]) for result in results]

        return run


def _ids(prompt: Sequence[int]) -> Any:
    import numpy as np  # noqa: PLC0415
    import openvino  # type: ignore[import-not-found]  # noqa: PLC0415

    return openvino.Tensor(np.array([prompt], np.int64))


def serve(sides: Mapping[str, Run], commands: Iterable[str], answers: IO[str]) -> None:
    """Answer each of *commands* with a line."""
    print(json.dumps("ready"), file=answers, flush=True)
    for line in commands:
        command = json.loads(line)
        print(json.dumps(sides[command["side"]](command["requests"])), file=answers, flush=True)


@contextlib.contextmanager
def only_answers() -> Iterator[IO[str]]:
    """Yield standard output, and send what libraries write there, from C++ too, to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        yield answers


def main() -> None:
    config = json.loads(sys.argv[1])
    with only_answers() as answers:
        for model in config["models"].values():
            if not Path(model["model"]).exists():
                export(model["checkpoint"], model["model"])
        serve(Pipelines(config).sides, sys.stdin, answers)


if __name__ == "__main__":
    main()
