"""Schedulers without workers, and verdicts for their plans."""

from collections.abc import Sequence

from protos.config.engine import CacheConfig, SchedulerConfig, SpeculativeConfig
from protos.interfaces import Proposer
from protos.messages import Request, RoundPlan, TokenLogprobs, Verdict, WorkerInfo
from runtime.core.scheduler import Scheduler
from runtime.core.sequence import Sequence as EngineSequence
from runtime.policy.base import NoSpeculation, Policy
from runtime.policy.batch_size import BatchSizePolicy
from runtime.text.detokenizer import DetokenizerFactory
from tests.support.distributed.fake_worker import make_request, tiny_tokenizer

INFO = WorkerInfo(num_blocks=32, block_size=4, max_model_len=64, vocab_size=10, speculates=True)
OFF = NoSpeculation()


def make_scheduler(
    info: WorkerInfo = INFO,
    proposers: Sequence[Proposer] = (),
    cache: CacheConfig | None = None,
    *,
    has_worker: bool | None = None,
    **limits: object,
) -> Scheduler:
    config = SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits})
    text = DetokenizerFactory(tiny_tokenizer())
    has_worker = not proposers if has_worker is None else has_worker
    return Scheduler(
        config, cache or CacheConfig(), info, proposers=proposers, has_worker=has_worker, detokenizers=text
    )


def fixed_k(k: int, **options: object) -> Policy:
    return BatchSizePolicy(SpeculativeConfig(method="any", num_speculative_tokens=k, **options))


def decoding(key: int, **options: object) -> EngineSequence:
    """Return a sequence with a prompt of one token, in slot *key*, that has generated one of its 64 tokens."""
    request = make_request(str(key), [1], max_tokens=64, **options)
    return EngineSequence(request, [1, 2], 65, None, 1, slot=key, key=key, num_sent_tokens=2)


def make_verdicts(plan: RoundPlan, *tokens: Sequence[int], proposed: int = 0) -> list[Verdict]:
    """Return one verdict per row that samples: all its *tokens* but the last are accepted draft tokens."""
    rows = [row for row in plan.rows if row.samples]
    return [
        Verdict(row.slot, ids, proposed, range(len(ids) - 1), [TokenLogprobs([t], [0.0], [1]) for t in ids])
        for row, ids in zip(rows, tokens, strict=True)
    ]


def started(*requests: Request, policy: Policy = OFF, **options: object) -> Scheduler:
    """Return a scheduler whose requests have computed their prompts and generated token 0."""
    scheduler = make_scheduler(**options)
    scheduler.admit(requests)
    plan = scheduler.schedule(policy)
    scheduler.commit(plan, make_verdicts(plan, *[[0]] * len(requests)))
    return scheduler
