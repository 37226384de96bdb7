"""Plans: budget, blocks, draft tokens, preemption and the prefix cache."""

import pytest

from protos.config.engine import CacheConfig
from protos.errors import ConfigError
from protos.messages import Request, RoundPlan, WorkerInfo
from runtime.core import planner as planning
from runtime.policy.base import Policy
from tests.support.distributed.fake_worker import EOS, FakeWorker, make_request
from tests.support.scheduling import INFO, OFF, fixed_k, make_scheduler, make_verdicts, started


def test_a_prompt_is_fed_in_chunks_and_only_the_last_one_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    scheduler.admit([make_request("a", [1] * 14)])
    rows = []
    for _ in range(3):
        plan = scheduler.schedule(OFF)
        rows += plan.rows
        scheduler.commit(plan, make_verdicts(plan, *[[2]] * plan.rows[0].samples))
    assert [(row.start, row.length, row.samples) for row in rows] == [(0, 6, False), (6, 6, False), (12, 2, True)]
    assert [len(row.new_block_ids) for row in rows] == [2, 1, 1]
    (row,) = scheduler.schedule(OFF).rows
    assert (row.start, row.length, row.new_token_ids, row.known_len) == (14, 1, [2], 15)


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, enable_chunked_prefill=False)
    scheduler.admit([make_request("a", [1] * 40), make_request("b", [2] * 30)])
    assert [row.length for row in scheduler.schedule(OFF).rows] == [40]
    with pytest.raises(ConfigError, match="max_num_batched_tokens 63 is less than max_model_len 64"):
        make_scheduler(max_num_batched_tokens=63, enable_chunked_prefill=False)


def test_accepted_drafts_move_the_computed_length_and_only_new_ids_are_told() -> None:
    scheduler = started(make_request("a", [1] * 5))
    plan = scheduler.schedule(fixed_k(4))
    assert (plan.rows[0].start, plan.rows[0].k) == (5, 4)
    scheduler.commit(plan, make_verdicts(plan, [5, 6, 7], proposed=4))
    (row,) = scheduler.schedule(fixed_k(4)).rows
    assert (row.start, row.length, row.known_len, row.new_token_ids) == (8, 1, 9, [5, 6, 7])


def test_draft_tokens_stop_one_before_the_last_output_and_before_the_context_ends() -> None:
    scheduler = started(make_request("a", [1] * 5, max_tokens=4))
    assert scheduler.schedule(fixed_k(9, draft_shape="chain")).rows[0].k == 2
    scheduler = started(make_request("a", [1] * 60, max_tokens=100))
    assert scheduler.schedule(fixed_k(9)).rows[0].k == 2


def test_draft_tokens_shrink_to_the_budget_and_leave_every_row_its_token() -> None:
    scheduler = started(*[make_request(name, [i + 1] * 4) for i, name in enumerate("abc")], max_num_batched_tokens=12)
    rows = scheduler.schedule(fixed_k(6)).rows
    assert [(row.length, row.k) for row in rows] == [(1, 6), (1, 3), (1, 0)]


def test_draft_tokens_shrink_to_the_blocks_before_anything_is_preempted() -> None:
    info = WorkerInfo(num_blocks=4, block_size=4, max_model_len=16, vocab_size=10)
    scheduler = started(make_request("a", [1] * 5), make_request("b", [2] * 3), info=info)
    rows = scheduler.schedule(fixed_k(7)).rows
    assert [(row.start, row.length, row.k) for row in rows] == [(5, 1, 6), (3, 1, 0)]
    assert scheduler.stats().preemptions == 0


def test_rows_without_draft_tokens_hold_no_blocks_for_them() -> None:
    scheduler = started(make_request("a", [1] * 3))
    assert scheduler.schedule(OFF).rows[0].new_block_ids == []
    scheduler = started(make_request("a", [1] * 3))
    assert len(scheduler.schedule(fixed_k(4)).rows[0].new_block_ids) == 1


def play(policy: Policy) -> list[RoundPlan]:
    info = WorkerInfo(num_blocks=8, block_size=4, max_model_len=24, vocab_size=10)
    scheduler, worker = make_scheduler(info, max_num_batched_tokens=7), FakeWorker(info, 8)
    scheduler.admit([make_request(str(i), [i, 1, 2, 3, 4, 5], max_tokens=12) for i in range(4)])
    while scheduler.num_unfinished:
        plan = scheduler.schedule(policy)
        scheduler.commit(plan, worker.run(plan))
    return worker.plans


def test_off_is_free_the_plans_are_those_of_an_engine_without_speculation() -> None:
    off = fixed_k(5, num_speculative_tokens_per_batch_size=((1, 100, 0),))
    assert play(off) == play(OFF)
    assert play(fixed_k(5)) != play(off)


def test_the_youngest_is_preempted_and_comes_back_with_prompt_and_output() -> None:
    info = WorkerInfo(num_blocks=5, block_size=4, max_model_len=16, vocab_size=10)
    scheduler = started(make_request("a", [1] * 7), make_request("b", [2] * 7), info=info)
    plan = scheduler.schedule(OFF)
    scheduler.commit(plan, make_verdicts(plan, [3], [4]))
    plan = scheduler.schedule(OFF)
    assert [row.start for row in plan.rows] == [8]
    assert scheduler.stats().preemptions == 1
    scheduler.commit(plan, make_verdicts(plan, [EOS]))
    plan = scheduler.schedule(OFF)
    assert [new.token_ids for new in plan.new] == [(*[2] * 7, 0, 4)]
    assert (plan.new[0].prompt_len, plan.rows[0].new_token_ids) == (7, [])
    assert (plan.rows[0].start, plan.rows[0].length) == (8, 1), "its full blocks were still there"


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler = started(make_request("a", [1] * 9))
    scheduler.admit([make_request("b", [1] * 9), make_request("c", [1] * 9, cache_salt="x")])
    rows = scheduler.schedule(OFF).rows
    assert [(row.start, row.length) for row in rows] == [(9, 1), (8, 1), (0, 9)]
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (27, 8, 27)


def test_prompt_logprobs_or_a_switched_off_cache_read_nothing_from_it() -> None:
    scheduler = started(make_request("a", [1] * 9))
    scheduler.admit([make_request("b", [1] * 9, prompt_logprobs=0)])
    assert scheduler.schedule(OFF).rows[1].start == 0
    scheduler = started(make_request("a", [1] * 9), cache=CacheConfig(enable_prefix_caching=False))
    scheduler.admit([make_request("b", [1] * 9)])
    assert scheduler.schedule(OFF).rows[1].start == 0


def test_prompt_logits_are_bounded_however_many_rows_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PROMPT_LOGITS", 9 * INFO.vocab_size)
    scheduler, worker = make_scheduler(), FakeWorker(INFO, 8)
    prompts = {"a": [1] * 14, "b": [2] * 7, "c": [3] * 5}
    scheduler.admit([make_request(name, prompt, prompt_logprobs=0) for name, prompt in prompts.items()])
    scheduler.admit([make_request("plain", [4] * 20, max_tokens=1)])
    emitted: dict[str, list[int]] = {name: [] for name in [*prompts, "plain"]}
    lengths = []
    while scheduler.num_unfinished:
        plan = scheduler.schedule(fixed_k(3))
        lengths.append([row.length for row in plan.rows])
        verdicts = worker.run(plan)
        assert sum(len(verdict.prompt_logprobs or ()) for verdict in verdicts) <= 9
        for output in scheduler.commit(plan, verdicts):
            emitted[output.request_id] += [entry.token_ids[0] for entry in output.prompt_logprobs or ()]
    assert lengths[:2] == [[9], [5, 4]]
    assert emitted == {**{name: prompt[1:] for name, prompt in prompts.items()}, "plain": []}


@pytest.mark.parametrize("chunked", [True, False])
def test_the_oldest_request_goes_on_where_the_vocabulary_is_huge(chunked: bool) -> None:
    info = WorkerInfo(num_blocks=32, block_size=4, max_model_len=64, vocab_size=1 << 26)
    scheduler = make_scheduler(info, enable_chunked_prefill=chunked)
    scheduler.admit([make_request("a", [1] * 3, prompt_logprobs=0), make_request("b", [1] * 3, prompt_logprobs=0)])
    plan = scheduler.schedule(OFF)
    assert [(row.length, row.samples) for row in plan.rows] == [(1, False)]
    scheduler.commit(plan, [])
    plan = scheduler.schedule(OFF)
    assert [(row.start, row.length) for row in plan.rows] == [(1, 1)]
    scheduler.commit(plan, [])
    plan = scheduler.schedule(OFF)
    assert [(row.start, row.length, row.samples) for row in plan.rows] == [(2, 1, True), (0, 1, False)]


def test_samples_of_one_prompt_read_it_once() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    prompt = [1, 2, 3] * 4
    scheduler.admit([make_request(f"a-{sample}", prompt) for sample in range(3)] + [make_request("b", [5])])
    fed = []
    for tokens in ([], [[0]], [[0]] * 2):
        plan = scheduler.schedule(OFF)
        fed.append([(row.start, row.length) for row in plan.rows])
        scheduler.commit(plan, make_verdicts(plan, *tokens))
        scheduler.check_integrity()
    assert fed == [[(0, 6)], [(6, 6)], [(12, 1), (8, 4), (8, 1)]]
    assert scheduler.stats().prefix_hits == 16


def test_samples_do_not_wait_for_what_they_could_not_share() -> None:
    def rows_of(*requests: Request, **options: object) -> int:
        scheduler = make_scheduler(**options)
        scheduler.admit(requests)
        return len(scheduler.schedule(OFF).rows)

    long = [1, 2, 3] * 4
    assert rows_of(make_request("a", [1] * 4), make_request("b", [1] * 4)) == 2
    assert rows_of(make_request("a", long), make_request("b", [*long, 5])) == 2
    assert rows_of(make_request("a", long), make_request("b", long, cache_salt="other")) == 2
    off = CacheConfig(enable_prefix_caching=False)
    assert rows_of(make_request("a", long), make_request("b", long), cache=off) == 2
    assert rows_of(make_request("a", long), make_request("b", long)) == 1


def test_requests_that_can_never_run_are_refused_with_the_numbers() -> None:
    scheduler = make_scheduler()
    long, empty, nothing = scheduler.admit(
        [make_request("a", [1] * 64), make_request("b", []), make_request("c", [1], max_tokens=0)]
    )
    assert long.error == "the prompt has 64 tokens; with max_model_len 64 it must have 1 to 63"
    assert "0 tokens" in empty.error
    assert "max_tokens is 0" in nothing.error
    assert not scheduler.schedule(OFF).rows
    with pytest.raises(ConfigError, match="max_model_len 64 is more than the 32 tokens that 8 KV blocks of 4 hold"):
        make_scheduler(WorkerInfo(8, 4, 64, 10))


def test_a_second_arrival_of_an_id_does_not_disturb_the_first() -> None:
    scheduler = started(make_request("a", [1]))
    assert scheduler.admit([make_request("a", [2])]) == []
    assert scheduler.num_unfinished == 1
    scheduler.check_integrity()
