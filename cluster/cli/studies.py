"""`slipstream simulate` and `slipstream tune`: their options."""

from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.cli.options import engine_options, one_model, with_options

DRAFT_HELP = "A speculative_config as JSON, with a `name` if wanted; may be repeated."
BATCH_SIZES, CONTEXTS = "1,2,4,8,16", "64,256"


@with_options(engine=engine_options())
def simulate(
    engine: dict[str, Any],
    *,
    logs: Annotated[list[Path], typer.Argument(help="JSON lines of prompts and outputs, as `generate --log` writes.")],
    draft: Annotated[list[str] | None, typer.Option(help=DRAFT_HELP)] = None,
    k: Annotated[
        str | None, typer.Option(help="Numbers of draft tokens to try with each draft, such as 1,2,4.")
    ] = None,
    target: Annotated[
        bool, typer.Option("--target", help="Load the target, for methods that read its hidden states.")
    ] = False,
    prompt_field: Annotated[str | None, typer.Option(help="Field of the prompt: text or token ids.")] = None,
    output_field: Annotated[str | None, typer.Option(help="Field of the output: text or token ids.")] = None,
    logprobs_field: Annotated[
        str | None, typer.Option(help="Field of the target's log-probabilities: by token id, for each output token.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of answers whose log does not say; default: greedy.", min=0.0, max=100.0)
    ] = None,
    num_answers: Annotated[int | None, typer.Option(help="Most answers of each log.", min=1)] = None,
    matched: Annotated[
        Path | None, typer.Option(help="Write the tokens matched so far after every step here, as JSON lines.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(help="Table of costs, for predictions; measured with --target if it does not exist.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes whose costs are measured.")] = BATCH_SIZES,
    contexts: Annotated[str, typer.Option(help="Numbers of known tokens at which costs are measured.")] = CONTEXTS,
    json: Annotated[Path | None, typer.Option(help="Write all figures here.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with a table and plots here.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the plots here; needs matplotlib.")] = None,
) -> None:
    """Replay drafts against logged answers, and print how many of their tokens would have been accepted.

    The target is --model, or the one that the log names; its weights are not read without --target. Batches have
    --max-num-seqs answers. Models run eager unless --no-enforce-eager is given.
    """
    from cluster.cli.simulate import OutputFiles, SimulateOptions, run  # noqa: PLC0415 - other commands need not load it
    from cluster.cli.simulate_costs import CostOptions  # noqa: PLC0415
    from cluster.simulate.logs import log_fields  # noqa: PLC0415

    table = None if costs is None else CostOptions(costs, batch_sizes, contexts)
    fields = log_fields(prompt_field, output_field, logprobs_field, temperature)
    files = OutputFiles(matched, json, html, png)
    run(engine, SimulateOptions(logs, draft or [], k, target, fields, num_answers, table, files))


@with_options(engine=engine_options(but=("model",)))
def tune(
    engine: dict[str, Any],
    *,
    positional_model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder; default: the embedded demo pair.")] = None,
    draft: Annotated[list[str] | None, typer.Option(help=DRAFT_HELP)] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL as for generate, or text with a prompt per line; default: the demo's.")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="Maximum number of prompts.", min=1)] = 16,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=2)] = 128,
    temperature: Annotated[float, typer.Option(help="Of the answers.", min=0.0, max=100.0)] = 0.0,
    k: Annotated[str, typer.Option(help="Numbers of draft tokens to try.")] = "1,2,3,5",
    batch_sizes: Annotated[str, typer.Option(help="Batch sizes to tune for.")] = BATCH_SIZES,
    contexts: Annotated[str, typer.Option(help="Numbers of known tokens to measure at.")] = CONTEXTS,
    output: Annotated[Path | None, typer.Option(help="Write the speculative_config here, as JSON.")] = None,
    serve_config: Annotated[Path | None, typer.Option(help="Write a file for slipstream serve --config here.")] = None,
    ray_serve_config: Annotated[Path | None, typer.Option(help="Write a file for serve deploy here.")] = None,
) -> None:
    """Measure a target, drafts and this machine for some minutes, and print the best speculative_config.

    ngram and suffix are always compared, too. null is printed if speculation does not pay.
    """
    from cluster.cli.tune import TuneOptions, run  # noqa: PLC0415 - other commands need not load it

    texts = (draft or [], prompts, num_prompts, max_tokens, temperature)
    options = TuneOptions(*texts, k, batch_sizes, contexts, output, serve_config, ray_serve_config)
    run(engine, one_model(positional_model, model), options)
