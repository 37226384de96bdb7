"""What `slipstream simulate` predicts from a log, against what engines do on prompts that are not in the log.

    python -m benchmarks.advice.predictions [--prompts 400] [--only "draft_model;suffix"] [--output figures.json]
    python -m benchmarks.advice.predictions --speed [--batches 1 8]

Prompts are cut out of files that the demo models never saw, at random, half of them for the log. The target answers
those, half greedily and half at temperature 0.8, and each method is replayed over the answers. Then engines with the
policy `fixed` answer the other half. The first figure is the predicted acceptance length by the measured one, wanted
within 3 %. Its interval is that of the prompts, which both halves were drawn from: 40 prompts leave 7 %. "Same prompts"
compares with an engine on the prompts of the log, so only ties in rounding are left.

With `--speed`, rounds are measured as `--costs` does, and the predicted speed-up is divided by the measured one,
wanted within 10 %. Nothing else may run then.
"""

import argparse
import random
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.shared import measure
from benchmarks.shared.make_workload import Cutter, heldout_texts
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item, SamplingSettings
from cluster.settings import engine_config
from cluster.simulate.costs import CostTable
from cluster.simulate.logs import LoggedAnswer, log_fields, read
from cluster.simulate.measure import Measuring
from cluster.simulate.measure import measure as measure_costs
from cluster.simulate.predict import predict
from cluster.simulate.replay import replay
from cluster.simulate.results import Replay
from cluster.simulate.setup import needs_target
from demo import head, pair
from protos.config.engine import EngineConfig
from protos.messages import SpeculationStats
from protos.outputs import RequestOutput
from protos.sampling import SamplingParams
from runtime.text.output_log import LoggedOutput, OutputLog, logged_sampling
from slipstream import LLM

Config = dict[str, Any]
METHODS: dict[str, Config] = {
    "draft_model": {"model": str(pair()[1]), "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "model": str(head("eagle3")), "num_speculative_tokens": 3, "draft_shape": "chain"},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
PROMPT_TOKENS, TOKENS, TEMPERATURE, ROWS, SEED = (16, 96), 96, 0.8, 8, 20260102
CONTEXTS = (64, 192)
"""Known tokens at which rounds are timed: the prompts and half of the answers lie between."""
WAVES, FEWEST_BLOCKS = 8, 4
"""Requests of a block for each that runs at once, and blocks. The prediction is for full batches: a request that ends
makes room for another, and answers differ in length, or plain decoding alone would end them together."""


@dataclass(frozen=True)
class PredictedRow:
    """The acceptance length of one method: predicted, measured on other prompts, and on the same ones."""

    method: str
    predicted: float
    measured: float
    ratio: measure.Ratio
    same_prompts: float

    def __str__(self) -> str:
        lengths = f"{self.predicted:.3f} | {self.measured:.3f} | {self.ratio}"
        return f"| {self.method} | {lengths} | {self.predicted / self.same_prompts:.4f} |"


@dataclass(frozen=True)
class SpeedRow:
    """The speed-up of one method at one batch size: predicted, and measured with its interval."""

    method: str
    batch: int
    predicted: float
    measured: measure.Ratio

    def __str__(self) -> str:
        low, high = self.predicted / self.measured.high, self.predicted / self.measured.low
        ratio = f"{self.predicted / self.measured.value:.3f} [{low:.3f}, {high:.3f}]"
        return f"| {self.method} | {self.batch} | {self.predicted:.3f} | {self.measured} | {ratio} |"


LENGTHS = (
    "| method | predicted acceptance length | measured | predicted / measured | the same, same prompts |\n"
    "|---|---|---|---|---|"
)
SPEEDS = "| method | batch | predicted speed-up | measured | predicted / measured |\n|---|---|---|---|---|"


def prompts(target: Path, count: int) -> list[tuple[int, ...]]:
    """Return *count* prompts from held-out files, as ids."""
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    cutter = Cutter(heldout_texts(Path(sysconfig.get_path("stdlib"))), tokenizer, random.Random(SEED))
    texts = [cutter.whole_lines(*PROMPT_TOKENS)[1] for _ in range(count)]
    return [tuple(one.ids) for one in tokenizer.encode_batch(texts, add_special_tokens=False)]


def arguments(target: Path, threads: int, speculative: Config | None, **options: Any) -> Config:
    """Return engine arguments of the acceptance part, which are those of the replay and of the engine."""
    common = {"model": str(target), "dtype": "float32", "enforce_eager": True, "max_num_seqs": ROWS}
    return {**common, "num_threads": threads, "speculative_config": speculative, **options}


def answered(engine: Config, given: Sequence[tuple[int, ...]]) -> tuple[list[RequestOutput], list[SamplingParams]]:
    """Return the answers of an engine, every other one greedy, and how they were sampled."""
    params = [
        SamplingParams(temperature=TEMPERATURE * (number % 2), seed=number, max_tokens=TOKENS)
        for number in range(len(given))
    ]
    with LLM(**engine) as llm:
        return llm.generate([{"prompt_token_ids": list(ids)} for ids in given], params, use_tqdm=False), params


def logged(engine: Config, given: Sequence[tuple[int, ...]]) -> list[LoggedAnswer]:
    """Return a log of the target's answers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        with OutputLog(path) as log:
            for result, params in zip(*answered(engine, given), strict=True):
                sample, settings = result.outputs[0], logged_sampling(params, params.seed or 0)
                log.write(
                    LoggedOutput(
                        result.prompt_token_ids,
                        sample.token_ids,
                        sampling=settings,
                        finish_reason=sample.finish_reason or "",
                    )
                )
        return read(path, log_fields(None, None))


def counted(engine: Config, given: Sequence[tuple[int, ...]]) -> list[SpeculationStats]:
    """Return what an engine counts for each prompt."""
    results, _ = answered(engine, given)
    return [each.speculation.counts() if each.speculation else SpeculationStats() for each in results]


def length(stats: Sequence[SpeculationStats]) -> float:
    """Return the mean acceptance length over the steps that had a draft."""
    return 1 + sum(each.accepted for each in stats) / max(1, sum(each.steps for each in stats))


def ratio(one: Sequence[SpeculationStats], other: Sequence[SpeculationStats]) -> measure.Ratio:
    """Return the ratio of two acceptance lengths; answers of both are resampled, separately."""
    rng = np.random.default_rng(0)

    def drawn(stats: Sequence[SpeculationStats]) -> float:
        return length([stats[i] for i in rng.integers(len(stats), size=len(stats))])

    low, high = np.percentile([drawn(one) / drawn(other) for _ in range(2000)], [2.5, 97.5])
    return measure.Ratio(length(one) / length(other), float(low), float(high))


def replayed(name: str, config: EngineConfig, answers: Sequence[LoggedAnswer]) -> Replay:
    """Replay one method over the log."""
    return replay(name, config, [answers], lambda line: None, lambda: None, with_target=needs_target(config))


def acceptance(
    name: str, found: Replay, engine: Config, seen: Sequence[tuple[int, ...]], unseen: Sequence[tuple[int, ...]]
) -> PredictedRow:
    """Compare a replay with engines on the other prompts, and on its own."""
    engine = {**engine, "speculative_config": {**engine["speculative_config"], "policy": "fixed"}}
    predicted, measured = [answer.stats for answer in found.answers], counted(engine, unseen)
    return PredictedRow(
        name, length(predicted), length(measured), ratio(predicted, measured), length(counted(engine, seen))
    )


def costs_of(found: Sequence[Replay], args: argparse.Namespace, target: Path) -> CostTable:
    """Measure rounds as `slipstream simulate --costs` does: compiled."""
    config = engine_config({"model": str(target), "num_threads": args.threads, "max_num_seqs": max(args.batches)})
    configs = [replace(config, speculative=each.speculative) for each in found]
    what = Measuring(args.batches, CONTEXTS, sorted({each.k for each in found}))
    return measure_costs(configs, what, lambda line: None, lambda: None)


def speeds(
    found: Replay, config: Config, costs: CostTable, unseen: Sequence[tuple[int, ...]], args: argparse.Namespace
) -> Iterator[SpeedRow]:
    """Compare the speed-up at each batch size with alternating engines."""
    target, predictions = args.model or pair()[0], predict(found, costs)
    for batch in args.batches:
        gains = [each.speedup for each in predictions if each.shape[0] == batch]
        sides = {
            name: DemoEngine(target, each, threads=args.threads, max_num_seqs=batch)
            for name, each in {"plain": None, "drafts": {**config, "policy": "fixed"}}.items()
        }
        blocks = answer_blocks(unseen, batch)
        runs = {name: partial(mixed, each) for name, each in sides.items()}
        measure.alternate(runs, blocks[:1])
        timings = measure.alternate(runs, blocks)
        yield SpeedRow(found.name, batch, float(np.exp(np.log(gains).mean())), timings.speedup("drafts", "plain"))
        for side in sides.values():
            side.llm.shutdown()


def answer_blocks(unseen: Sequence[tuple[int, ...]], batch: int) -> list[list[Item]]:
    """Return the requests of all blocks; prompts come round again where there are not enough."""
    size = batch * (WAVES if batch > 1 else 2)
    rng = random.Random(SEED)
    count = max(FEWEST_BLOCKS, len(unseen) // size)
    items = [Item(unseen[i % len(unseen)], TOKENS) for i in range(count * size)]
    if batch > 1:
        items = [item.varied(rng) for item in items]
    return [items[i : i + size] for i in range(0, len(items), size)]


def mixed(engine: DemoEngine, items: Sequence[Item]) -> int:
    """Run a block, the first half greedily, the second sampled, as in the log; return the number of tokens."""
    half = len(items) // 2
    return engine.all(items[:half], SamplingSettings(0.0)) + engine.all(items[half:], SamplingSettings(TEMPERATURE))


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--prompts", type=measure.COUNT, default=400, help="of the log, and of what is measured")
    parser.add_argument("--only", help="names of methods, separated by semicolons")
    parser.add_argument("--speed", action="store_true", help="compare speed-ups, too, on a quiet machine")
    parser.add_argument("--batches", nargs="*", type=measure.COUNT, default=[1, 8], help="batch sizes of the speed-ups")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = args.model or pair()[0]
    drawn = prompts(target, 2 * args.prompts)
    seen, unseen = drawn[::2], drawn[1::2]
    names = [name.strip() for name in args.only.split(";")] if args.only else list(METHODS)
    answers = logged(arguments(target, args.threads, None), seen)
    engines = {name: arguments(target, args.threads, METHODS[name]) for name in names}
    found = {name: replayed(name, engine_config(engines[name]), answers) for name in names}
    lines: list[PredictedRow | SpeedRow] = []
    print(LENGTHS)
    for name in names:
        lines.append(acceptance(name, found[name], engines[name], seen, unseen))
        print(lines[-1], flush=True)
    if args.speed:
        print(SPEEDS)
        costs = costs_of(list(found.values()), args, target)
        for name in names:
            for row in speeds(found[name], METHODS[name], costs, unseen, args):
                lines.append(row)
                print(row, flush=True)
    figures = {"environment": measure.environment(args.threads), "lines": [asdict(line) for line in lines]}
    measure.write(args.output, figures)


if __name__ == "__main__":
    main()
