"""`slipstream bench`: load on an OpenAI server, methods compared on a model, or the benchmarks of a checkout."""

import asyncio
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.progress import Progress

from cluster.bench import datasets as bench_datasets
from cluster.bench import report as bench_report
from cluster.bench.client import BenchTarget, RequestTiming
from cluster.bench.load import Traffic
from cluster.bench.load import run as run_load
from cluster.cli.console import ERR, OUT
from cluster.cli.options import HYPHENS, CommandGroup, engine_options, one_model, with_options
from cluster.files import check_outputs
from protos.config import aliases, argument_names
from protos.errors import ConfigError

SERVE, COMPARE, ENGINE = "serve", "compare", "engine"
OWN_OPTIONS = ("model", "max_num_seqs", argument_names.SPECULATIVE, *sorted(aliases.NAMES))
"""Engine arguments that `compare` sets itself, by options of its own."""


app = typer.Typer(
    cls=CommandGroup,
    help="Measure a server under load (serve), methods on a model (compare), or the engine against others (engine).",
    rich_markup_mode=None,
    add_completion=False,
)


def run(args: list[str]) -> None:
    """Run `slipstream bench` with *args*; options without a command go to `engine`."""
    first = args[0] if args else "-"
    app([ENGINE, *args] if first.startswith("-") and first != "--help" else args, prog_name="slipstream bench")


@app.command(
    ENGINE, context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def engine(context: typer.Context) -> None:
    """Run the benchmarks of the checkout; arguments go to `python -m benchmarks`."""
    if find_spec("benchmarks") is None or find_spec("benchmarks.__main__") is None:
        raise ConfigError("the benchmarks are not installed: run this from a checkout, or `make bench` there")
    import runpy  # noqa: PLC0415 - loads torch

    sys.argv[1:] = context.args
    runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)


@app.command(SERVE)
def serve(
    *,
    base_url: Annotated[str, typer.Option(help="URL of the server, without /v1.")] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, typer.Option(help="/v1/completions or /v1/chat/completions.")] = "/v1/completions",
    model: Annotated[str | None, typer.Option(help="Default: the first one the server lists.")] = None,
    dataset: Annotated[
        str, typer.Option("--dataset", "--dataset-name", help="random, sharegpt, custom, workload, or a file.")
    ] = bench_datasets.RANDOM,
    dataset_path: Annotated[Path | None, typer.Option(help="ShareGPT JSON, or JSON lines with `prompt`.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests in all.", min=1)] = 100,
    request_rate: Annotated[float, typer.Option(help="Requests per second; inf: all at once.")] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1: Poisson; less: bursts; more: even.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Most requests in flight.", min=1)] = None,
    random_input_len: Annotated[int, typer.Option(help="Words of a random prompt.", min=1)] = 256,
    output_len: Annotated[
        int | None, typer.Option("--output-len", "--random-output-len", help="Tokens of each answer.", min=1)
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Full-length answers, if supported.")] = False,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of prompts and arrival times.")] = 0,
    api_key: Annotated[str | None, typer.Option(help="Sent as a bearer token.")] = None,
    extra_body: Annotated[str | None, typer.Option(help="JSON object added to every request.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write all metrics here as JSON.")] = None,
) -> None:
    """Put load on an OpenAI server, and print latencies, throughput and acceptance."""
    check_outputs([output], [bench_datasets.resolve(dataset, dataset_path)[1]])
    options = bench_datasets.DatasetOptions(dataset, dataset_path, num_prompts, random_input_len, output_len, seed)
    traffic = Traffic(request_rate, burstiness, max_concurrency, seed)
    extra = {"temperature": temperature, **({"ignore_eos": True} if ignore_eos else {}), **_extra(extra_body)}
    target = BenchTarget(base_url.rstrip("/"), endpoint, model or "", api_key, extra)
    found = asyncio.run(_measure(target, bench_datasets.load(options), traffic))
    for table in bench_report.tables(found):
        OUT.print(table)
    if output is not None:
        content = {
            "dataset": dataset,
            "num_prompts": num_prompts,
            "request_rate": "inf" if request_rate == float("inf") else request_rate,  # JSON has no infinity
            "max_concurrency": max_concurrency,
            "seed": seed,
            **found,
        }
        output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if found["failed"]:
        raise ConfigError(f"{found['failed']} of {num_prompts} requests failed: {'; '.join(found['errors'][:3])}")


@app.command(COMPARE, context_settings=HYPHENS)
@with_options(engine=engine_options(but=OWN_OPTIONS))
def compare(
    engine: dict[str, Any],
    *,
    positional_model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the embedded demo pair.")] = None,
    methods: Annotated[
        list[str],
        typer.Option(help="Methods, or drafts' folders or Hub ids, by commas; or [NAME=]JSON. May be repeated."),
    ],
    dataset: Annotated[Path, typer.Option(help="Spec-Bench's question.jsonl, ShareGPT JSON, or JSONL of prompts.")],
    num_prompts: Annotated[int, typer.Option(help="Most questions, taken from each category in turn.", min=1)] = 80,
    max_turns: Annotated[int, typer.Option(help="Most turns of each question.", min=1)] = 2,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "--output-len", help="Most tokens of each answer.", min=1)
    ] = 256,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers of --max-tokens tokens.")] = False,
    temperature: Annotated[float, typer.Option(help="0: greedy.", min=0.0, max=100.0)] = 0.0,
    batch_size: Annotated[int, typer.Option(help="Questions asked at once.", min=1)] = 1,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; default: if there is one.")
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(help="Draft tokens of methods that do not state them.", min=1)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write all figures here as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Plot to write: .html, or .png, which needs matplotlib.")] = None,
) -> None:
    """Compare methods with plain decoding on your model: speed-up and mean accepted tokens by category of question.

    Every method has as many draft tokens in each step as it can, unless its JSON names another policy. Exit status 1:
    an answer differs from that of plain decoding, without a floating-point tie.
    """
    from cluster.bench.compare import CompareOptions  # noqa: PLC0415 - loads torch
    from cluster.cli.compare import CompareCommand, run  # noqa: PLC0415

    arguments = {**engine, "model": one_model(positional_model, model)}
    options = CompareOptions(max_tokens, temperature, ignore_eos, batch_size)
    command = CompareCommand(
        methods, dataset, num_prompts, max_turns, options, chat, num_speculative_tokens, output, plot
    )
    if not run(arguments, command):
        raise typer.Exit(1)


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"extra_body is not valid JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"extra_body must be a JSON object, got {text[:80]}")
    return extra


async def _measure(target: BenchTarget, prompts: list[bench_datasets.BenchPrompt], traffic: Traffic) -> dict[str, Any]:
    model = target.model or await _first_model(target)
    target = BenchTarget(target.base_url, target.endpoint, model, target.api_key, target.extra)
    with Progress(console=ERR, transient=True, disable=not ERR.is_terminal) as progress:
        task = progress.add_task(f"requests to {model}", total=len(prompts))

        def on_done(timing: RequestTiming) -> None:
            progress.advance(task)

        return {"model": model, **bench_report.metrics(await run_load(target, prompts, traffic, on_done))}


async def _first_model(target: BenchTarget) -> str:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{target.base_url}/v1/models", headers=target.headers) as response,
        ):
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{target.base_url}/v1/models lists no model ({type(error).__name__}: {error}); "
            "is the server up? --model names one"
        ) from None
