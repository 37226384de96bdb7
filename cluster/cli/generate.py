"""`slipstream generate`: one prompt, streamed, or a file of prompts."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.cli.console import ERR, show_progress, show_warnings, write
from cluster.llm import LLM
from protos.config.engine import EngineConfig
from protos.errors import ConfigError, InvalidRequestError, SlipstreamError
from protos.messages import SpeculationStats
from protos.outputs import RequestOutput, SpeculativeDecodingMetrics, total
from protos.sampling import SamplingParams

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


def stream(config: EngineConfig, prompt: str, sampling: dict[str, Any]) -> None:
    """Complete *prompt*, printing text as it arrives, then the statistics."""
    show_warnings()
    params = SamplingParams(**sampling)
    with LLM.from_config(config, show_progress) as llm:
        started, num_tokens, stats = time.monotonic(), 0, SpeculationStats()
        write(prompt)
        for output in llm.stream(prompt, params):
            write(output.text)
            num_tokens += len(output.token_ids)
            stats = output.speculation or stats
            if output.error is not None:
                raise SlipstreamError(output.error)
        write("\n")
        for line in summary(num_tokens, time.monotonic() - started, SpeculativeDecodingMetrics.of(stats)):
            show_progress(line)


def summary(num_tokens: int, seconds: float, speculation: SpeculativeDecodingMetrics) -> list[str]:
    """Return lines with tokens per second, mean acceptance length, and acceptance per position."""
    lines = [f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / max(seconds, 1e-9):.1f} tokens/s"]
    if speculation.mean_acceptance_length is None:
        return [*lines, "speculation: off"]
    shares = ", ".join(f"{share:.0%}" for share in speculation.acceptance_per_position)
    return [
        *lines,
        f"mean acceptance length: {speculation.mean_acceptance_length:.2f} tokens per step "
        f"({speculation.num_accepted_draft_tokens} of {speculation.num_draft_tokens} draft tokens accepted)",
        f"acceptance per position: {shares}",
    ]


def batch(config: EngineConfig, prompts: Path, output: Path, sampling: dict[str, Any]) -> None:
    """Complete every line of the JSONL file *prompts*; write one line each to *output*, in the same order."""
    show_warnings()
    items = read_items(prompts)
    params = [_params(item, sampling, f"{prompts}:{number}") for number, item in items]
    inputs = [{key: item[key] for key in PROMPT_FIELDS if key in item} for _, item in items]
    if not output.parent.is_dir():
        raise ConfigError(f"there is no folder {output.parent} to write {output.name} to")
    with LLM.from_config(config, show_progress) as llm:
        started = time.monotonic()
        results = llm.generate(inputs, params, use_tqdm=ERR.is_terminal or ERR.is_dumb_terminal)
        seconds = time.monotonic() - started
    lines = [json.dumps(_line(result), ensure_ascii=False) for result in results]
    output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    show_progress(f"{len(results)} prompts written to {output}")
    num_tokens = sum(result.metrics.num_generation_tokens for result in results)
    counted = total(result.speculation.counts() for result in results if result.speculation)
    for line in summary(num_tokens, seconds, SpeculativeDecodingMetrics.of(counted)):
        show_progress(line)


def read_items(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a JSONL file with their line numbers; a bare string is a prompt."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {type(error).__name__}") from None
    items = [(number, _item(line, f"{path}:{number}")) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f"{path} has no prompts")
    return items


def _item(line: str, place: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from None
    if isinstance(item, str):
        return {"prompt": item}
    if not isinstance(item, dict) or not {"prompt", "prompt_token_ids"} & item.keys():
        raise ConfigError(f'{place} must be a string, or an object with "prompt" or "prompt_token_ids"')
    return item


def _params(item: dict[str, Any], sampling: dict[str, Any], place: str) -> SamplingParams:
    """Return the sampling parameters of a line; its own options override those of the command."""
    own = {key: value for key, value in item.items() if key not in PROMPT_FIELDS}
    try:
        return SamplingParams(**{**sampling, **own})
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{place}: {error}", error.param) from None


def _line(result: RequestOutput) -> dict[str, Any]:
    return {
        "prompt": result.prompt,
        "outputs": [
            {
                "text": sample.text,
                "token_ids": sample.token_ids,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in result.outputs
        ],
        "speculative_decoding": asdict(result.speculation) if result.speculation else None,
    }
