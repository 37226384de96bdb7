"""Speculation configured but off, against speculation not configured: the first must cost nothing.

    python -m benchmarks.off_is_free [--blocks 200] [--output figures.json]

Each block runs both sides on the same prompt, a different one first each time. The figure is the median over blocks of
the ratio of their times, with a bootstrap 95 % interval.
"""

from dataclasses import asdict

import torch

from benchmarks.shared import measure, workload
from benchmarks.shared.sides import DemoEngine
from benchmarks.shared.workload import Item
from demo import pair

CONFIGURED, PLAIN = "configured but off", "not configured"
POINT_AT_MOST, UPPER_AT_MOST = 1.01, 1.02
TOKENS = 64
ALL_BATCH_SIZES = 1 << 20


def main() -> None:
    parser = measure.arguments(__doc__)
    parser.add_argument("--blocks", type=measure.COUNT, default=200)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, draft = args.model or pair()[0], args.draft or pair()[1]
    speculative = {
        "model": str(draft),
        "num_speculative_tokens": args.num_speculative_tokens,
        "num_speculative_tokens_per_batch_size": [[1, ALL_BATCH_SIZES, 0]],
    }
    configured, plain = (DemoEngine(target, config, threads=args.threads) for config in (speculative, None))
    items = [(Item(item.prompt, TOKENS),) for item in workload.load(target, args.limit).single]
    runs = {CONFIGURED: configured.all, PLAIN: plain.all}
    for run in runs.values():
        run(items[0])  # warm
    timings = measure.alternate(runs, [items[block % len(items)] for block in range(args.blocks)])
    ratio = timings.slowdown(CONFIGURED, PLAIN)
    print(
        f"{CONFIGURED} / {PLAIN}, time over {args.blocks} blocks of {TOKENS} tokens: {ratio}"
        f"   wanted <= {POINT_AT_MOST}, upper bound <= {UPPER_AT_MOST}"
    )
    measure.write(
        args.output,
        {
            "environment": measure.environment(args.threads),
            "blocks": args.blocks,
            "tokens": TOKENS,
            "ratio": asdict(ratio),
            "seconds": {side: values.tolist() for side, values in timings.seconds.items()},
        },
    )


if __name__ == "__main__":
    main()
