"""`slipstream generate`: one prompt, streamed, or a file of prompts."""

import contextlib
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.cli.console import ERR, show_progress, show_warnings, write
from cluster.files import check_outputs, read_objects
from cluster.llm import LLM
from protos.config.engine import EngineConfig
from protos.errors import ConfigError, InvalidRequestError, SlipstreamError
from protos.messages import SpeculationStats
from protos.outputs import CompletionOutput, RequestOutput, SpeculativeDecodingMetrics, total
from protos.sampling import SamplingParams
from protos.seeds import mix_seed
from runtime.text.output_log import AnswerRecorder, LoggedOutput, OutputLog, logged_sampling

PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")


def stream(config: EngineConfig, prompt: str, sampling: dict[str, Any], log: Path | None = None) -> None:
    """Complete *prompt*, printing text as it arrives, then the statistics; add the answer to *log*."""
    show_warnings()
    (params,) = _seeded([SamplingParams(**sampling)], config)
    with _opened(log) as opened, LLM.from_config(config, show_progress) as llm:
        started, answer, stats = time.monotonic(), AnswerRecorder(), SpeculationStats()
        write(prompt)
        for output in llm.stream(prompt, params):
            write(output.text)
            answer.add(output)
            stats = output.speculation or stats
            if output.error is not None:
                raise SlipstreamError(output.error)
        write("\n")
        seconds, counted = time.monotonic() - started, SpeculativeDecodingMetrics.of(stats)
        for line in summary(len(answer.token_ids), seconds, counted, is_on=config.speculative is not None):
            show_progress(line)
        if opened is not None:
            settings = logged_sampling(params, _used(config, params.seed or 0))
            opened.write(answer.line(config.model.model, prompt, llm.get_tokenizer().encode(prompt), settings))


def summary(num_tokens: int, seconds: float, speculation: SpeculativeDecodingMetrics, *, is_on: bool) -> list[str]:
    """Return lines with tokens per second, mean acceptance length, and acceptance per position."""
    lines = [f"{num_tokens} tokens in {seconds:.2f} s: {num_tokens / max(seconds, 1e-9):.1f} tokens/s"]
    if speculation.mean_acceptance_length is None:
        return [*lines, "speculation: no draft tokens were scored" if is_on else "speculation: off"]
    shares = ", ".join(f"{share:.0%}" for share in speculation.acceptance_per_position)
    return [
        *lines,
        f"mean acceptance length: {speculation.mean_acceptance_length:.2f} tokens per step "
        f"({speculation.num_accepted_draft_tokens} of {speculation.num_draft_tokens} draft tokens accepted)",
        f"acceptance per position: {shares}",
    ]


def batch(
    config: EngineConfig, prompts: Path, output: Path | None, sampling: dict[str, Any], log: Path | None = None
) -> None:
    """Complete every line of the JSONL file *prompts*; write one line each to *output*, in the same order.

    Append a line for each answer to *log*.
    """
    show_warnings()
    check_outputs([output, log], [prompts])
    items = read_items(prompts)
    params = _seeded([_params(item, sampling, place) for place, item in items], config)
    inputs = [{key: item[key] for key in PROMPT_FIELDS if key in item} for _, item in items]
    with _opened(log) as opened, LLM.from_config(config, show_progress) as llm:
        started = time.monotonic()
        results = llm.generate(inputs, params, use_tqdm=ERR.is_terminal or ERR.is_dumb_terminal)
        seconds = time.monotonic() - started
        if opened is not None:
            _log_all(opened, config, results, params)
            show_progress(f"{sum(len(result.outputs) for result in results)} answers added to {log}")
    if output is not None:
        lines = [json.dumps(_line(result), ensure_ascii=False) for result in results]
        output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        show_progress(f"{len(results)} prompts written to {output}")
    num_tokens = sum(result.metrics.num_generation_tokens for result in results)
    counted = total(result.speculation.counts() for result in results if result.speculation)
    metrics = SpeculativeDecodingMetrics.of(counted)
    for line in summary(num_tokens, seconds, metrics, is_on=config.speculative is not None):
        show_progress(line)


@contextlib.contextmanager
def _opened(log: Path | None) -> Iterator[OutputLog | None]:
    """Open *log* before anything is loaded; None without one."""
    if log is None:
        yield None
        return
    with OutputLog(log) as opened:
        yield opened


def _seeded(params: Sequence[SamplingParams], config: EngineConfig) -> list[SamplingParams]:
    """Give parameters without a seed the one that the engine would draw, so that it can be logged."""
    drawn = random.Random(config.seed)
    return [replace(one, seed=drawn.getrandbits(64)) if one.seed is None else one for one in params]


def _used(config: EngineConfig, seed: int) -> int | None:
    """Return the seed of a sample; None if the engine used another one, which it does not tell."""
    return None if config.mixes_seeds else seed


def _log_all(
    log: OutputLog, config: EngineConfig, results: Sequence[RequestOutput], params: Sequence[SamplingParams]
) -> None:
    for result, one in zip(results, params, strict=True):
        for sample in result.outputs:
            log.write(_logged(config, result.prompt, result.prompt_token_ids, one, sample))


def _logged(
    config: EngineConfig,
    prompt: str | None,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    sample: CompletionOutput,
) -> LoggedOutput:
    logprobs = sample.logprobs
    return LoggedOutput(
        prompt_ids,
        sample.token_ids,
        config.model.model,
        prompt,
        sample.text,
        logged_sampling(params, _used(config, mix_seed(params.seed or 0, sample.index))),
        sample.finish_reason or "",
        None if logprobs is None else [{token: found.logprob for token, found in each.items()} for each in logprobs],
    )


def read_items(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the objects of a JSONL file with their places, `file:line`; a bare string is a prompt."""
    items = [(place, _item(value, place)) for place, value in read_objects(path)]
    if not items:
        raise ConfigError(f"{path} has no prompts")
    return items


def _item(item: Any, place: str) -> dict[str, Any]:
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
