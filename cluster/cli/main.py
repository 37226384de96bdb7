"""The `slipstream` command: serve, generate, check, simulate, tune, build-datastore, env, doctor, bench."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster import shadowing
from cluster.cli import studies
from cluster.cli.console import OUT, show_error
from cluster.cli.env import version
from cluster.cli.options import (
    HYPHENS,
    CommandGroup,
    engine_options,
    one_model,
    safety_options,
    sampling_options,
    server_options,
    with_options,
)
from cluster.settings import engine_config, with_serving_defaults
from protos.config.engine import ModelConfig
from protos.errors import ConfigError, SlipstreamError

FAILED = 2
INTERRUPTED = 130
"""As shells have it, and typer while a command runs."""

app = typer.Typer(
    name="slipstream",
    cls=CommandGroup,
    help="Lossless speculative decoding. Without --model, the embedded demo pair is used.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables truncate long option names
    context_settings=HYPHENS,
)


def _show_version(show: bool) -> None:
    if show:
        OUT.print(f"slipstream {version()}", highlight=False)
        raise typer.Exit


@app.callback()
def _main(
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Lossless speculative decoding. Without --model, the embedded demo pair is used."""


@app.command(context_settings=HYPHENS)
@with_options(engine=engine_options(), sampling=sampling_options(max_tokens=128, temperature=0.0))
def generate(
    engine: dict[str, Any],
    sampling: dict[str, Any],
    *,
    prompt: Annotated[str | None, typer.Argument(help="Text to complete.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSONL: a string, or an object with `prompt`, per line.")] = None,
    output: Annotated[Path | None, typer.Option(help="JSONL of results for --prompts.")] = None,
    log: Annotated[Path | None, typer.Option(help="JSONL to add the answers to, for `slipstream simulate`.")] = None,
    top_logprobs: Annotated[
        int | None, typer.Option(help="Log so many log-probabilities of each token, too.", min=0)
    ] = None,
) -> None:
    """Complete a prompt, streaming, or a file of prompts; then print speed and acceptance.

    One prompt runs eager unless --no-enforce-eager is given: compiling takes longer than it saves.
    """
    from cluster.cli import generate  # noqa: PLC0415 - other commands need not load it

    if (prompt is None) == (prompts is None):
        raise ConfigError("give one prompt, or a file of them with --prompts")
    if prompt == "":
        raise ConfigError("prompt must not be empty")
    if top_logprobs is not None and log is None:
        raise ConfigError("--top-logprobs needs --log, the file to write them to")
    sampling = {**sampling, "logprobs": top_logprobs}
    if prompts is None:
        generate.stream(engine_config({"enforce_eager": True, **engine}), prompt or "", sampling, log)
    elif output is None and log is None:
        raise ConfigError("--prompts needs --output, the file to write the results to, or --log")
    else:
        generate.batch(engine_config(engine), prompts, output, sampling, log)


@app.command(context_settings=HYPHENS)
@with_options(servers=server_options(), engine=engine_options(but=("model",)), safety=safety_options())
def serve(
    servers: dict[str, Any],
    engine: dict[str, Any],
    safety: dict[str, Any],
    *,
    positional_model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the embedded demo pair.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="File of a chat template, or the template.")] = None,
    tool_call_parser: Annotated[str | None, typer.Option(help="How calls are written: hermes, llama3_json.")] = None,
    enable_auto_tool_choice: Annotated[
        bool, typer.Option("--enable-auto-tool-choice", help="Let the model choose to call.")
    ] = False,
    per_request_spec_decode_metrics: Annotated[str, typer.Option(help="none, summary or detailed.")] = "none",
    output_log: Annotated[
        Path | None, typer.Option(help="JSONL of answers, of requests with the header x-slipstream-log-output: 1.")
    ] = None,
    shutdown_timeout: Annotated[int, typer.Option(help="Seconds that answers in flight have to end.", min=0)] = 30,
) -> None:
    """Serve the OpenAI HTTP API and the gRPC API."""
    from cluster.cli import serve  # noqa: PLC0415 - as above
    from runtime.http.tools.choice import ToolOptions  # noqa: PLC0415

    config = engine_config({**with_serving_defaults(engine), "model": one_model(positional_model, model)})
    serve.run(
        config,
        servers=servers,
        chat_template=chat_template,
        spec_metrics=per_request_spec_decode_metrics,
        grace_s=shutdown_timeout,
        tools=ToolOptions(tool_call_parser, enable_auto_tool_choice),
        safety=safety,
        output_log=output_log,
    )


@app.command(context_settings=HYPHENS)
@with_options(engine=engine_options(but=("model",)))
def check(
    engine: dict[str, Any],
    *,
    positional_model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the embedded demo pair.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL as for generate, or text with a prompt per line; default: the demo's.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Maximum number of prompts.", min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each compared answer.", min=1)] = 64,
    samples: Annotated[
        int,
        typer.Option(help="Answers sampled after each of the first 4 prompts, to test their distribution.", min=100),
    ] = 1000,
    temperature: Annotated[float, typer.Option(help="Of seeded answers and samples.", min=0.01, max=100.0)] = 1.0,
    false_alarm: Annotated[
        float, typer.Option(help="Probability of failing although nothing is wrong.", min=1e-12, max=0.1)
    ] = 1e-6,
    json: Annotated[Path | None, typer.Option(help="Write the full report here.")] = None,
) -> None:
    """Check that speculation changes nothing: the same answers with and without it, sampled from the same distribution.

    Exit status 0: passed; 1: failed, or nothing was shown; 2: the check could not run. --seed determines all seeds.
    """
    from cluster.check.check import CheckOptions  # noqa: PLC0415 - as above
    from cluster.cli.check import read_prompts, run  # noqa: PLC0415

    config = engine_config({"seed": 0, **engine, "model": one_model(positional_model, model)})
    seed = config.seed or 0
    options = CheckOptions(read_prompts(prompts, num_prompts), max_tokens, samples, temperature, seed, false_alarm)
    if not run(config, options, json, prompts):
        raise typer.Exit(1)


app.command(context_settings=HYPHENS)(studies.simulate)
app.command(context_settings=HYPHENS)(studies.tune)


@app.command("build-datastore", context_settings=HYPHENS)
def build_datastore(
    sources: Annotated[list[Path], typer.Argument(help="Text files, or folders of them.")],
    *,
    output: Annotated[Path, typer.Option(help="File to write.")],
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the embedded demo target.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder; default: the model's.")] = None,
    revision: Annotated[str | None, typer.Option(help="Of the model or tokenizer on the Hub.")] = None,
    download_dir: Annotated[str | None, typer.Option(help="Where Hub files are kept.")] = None,
) -> None:
    """Build the datastore of retrieval-based speculation (method rest) from text files."""
    from cluster.cli import datastore  # noqa: PLC0415 - as above

    name = tokenizer or model or datastore.demo_model()
    datastore.run(ModelConfig(name, revision=revision, download_dir=download_dir), sources, output)


@app.command(context_settings=HYPHENS)
@with_options(engine=engine_options())
def env(engine: dict[str, Any]) -> None:
    """Print the environment for a bug report: versions, processor, devices, and the resulting configuration."""
    from cluster.cli import env  # noqa: PLC0415 - as above

    env.show(engine_config(engine))


@app.command(context_settings=HYPHENS)
def doctor(
    *,
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option("--tensor-parallel-size", "-tp", help="Target ranks; default: by the number of devices.", min=1),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    share_devices: Annotated[
        bool, typer.Option("--share-devices", help="Several ranks on one device; NCCL must be configured to allow it.")
    ] = False,
    ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Also check Ray.")] = True,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check and measure engines on this machine's GPU instead: about ten minutes.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="With --gpu: larger models, and other engines.")] = False,
    output: Annotated[Path | None, typer.Option(help="With --gpu: a JSON file for the results.")] = None,
) -> None:
    """Check devices, process groups and Ray with real processes; print errors and remedies."""
    if gpu:
        from cluster.cli import gpu_check  # noqa: PLC0415 - as above

        if not gpu_check.run(device, output, is_full=full):
            raise typer.Exit(1)
        return
    if full or output is not None:
        raise ConfigError("--full and --output are options of --gpu")
    from cluster.cli.doctor import run  # noqa: PLC0415
    from cluster.doctor import DoctorOptions  # noqa: PLC0415

    options = DoctorOptions(tensor_parallel_size, device, share_devices)
    if not run(options, with_ray=ray):
        raise typer.Exit(1)


@app.command(
    context_settings={**HYPHENS, "allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def bench(context: typer.Context) -> None:
    """Measure: `bench serve` puts load on a server, `bench compare` compares methods; others go to `benchmarks`."""
    from cluster.cli import bench  # noqa: PLC0415 - as above

    bench.run(context.args)


def main() -> None:
    """Run the command line. A `SlipstreamError` is printed as one line on stderr; exit status 2."""
    try:
        shadowing.check()
        app(prog_name="slipstream")
    except SlipstreamError as error:
        show_error(str(error))
        sys.exit(FAILED)
    except BrokenPipeError:  # stdout was closed by its reader
        sys.exit(1)
    except KeyboardInterrupt:  # before a command runs
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
