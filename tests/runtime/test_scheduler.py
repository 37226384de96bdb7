"""Plans and commits, one behaviour at a time."""

from collections.abc import Sequence

import pytest
from msgspec import structs

from protos.config.engine import CacheConfig, SchedulerConfig, SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.errors import ConfigError, EngineDeadError
from protos.interfaces import DraftService, Proposer, SequenceListener
from protos.messages import Abort, Request, RoundPlan, SpeculationStats, TokenLogprobs, Verdict, WorkerInfo
from protos.sampling import SamplingParams
from runtime.core import planner as planning
from runtime.core.controller import Controller, LocalInbox
from runtime.core.scheduler import Scheduler
from runtime.core.speculation_policy import NoSpeculation, Policy, SpeculationPolicy, make_policy
from runtime.text.detokenizer import DetokenizerFactory
from tests.support.distributed.fake_worker import EOS, FakeWorker, make_request, tiny_tokenizer
from tests.support.in_one_process import InOneProcess

INFO = WorkerInfo(num_blocks=32, block_size=4, max_model_len=64, vocab_size=10, speculates=True)
OFF = NoSpeculation()


def make(
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


def k_of(k: int, **options: object) -> Policy:
    return SpeculationPolicy(SpeculativeConfig(method="any", num_speculative_tokens=k, **options))


def say(plan: RoundPlan, *said: Sequence[int], proposed: int = 0) -> list[Verdict]:
    """One verdict a row: all but the last token were accepted drafts."""
    rows = [row for row in plan.rows if row.samples]
    return [
        Verdict(row.slot, ids, proposed, range(len(ids) - 1), [TokenLogprobs([t], [0.0], [1]) for t in ids])
        for row, ids in zip(rows, said, strict=True)
    ]


def begun(*requests: Request, policy: Policy = OFF, **options: object) -> Scheduler:
    """A scheduler whose requests have read their prompts and said token 0."""
    scheduler = make(**options)
    scheduler.admit(requests)
    plan = scheduler.schedule(policy)
    scheduler.commit(plan, say(plan, *[[0]] * len(requests)))
    return scheduler


def end_with(said: list[int], request: Request) -> object:
    """Let a round accept everything said at once; return the request's output."""
    scheduler = make()
    scheduler.admit([request])
    plan = scheduler.schedule(k_of(len(said)))
    (output,) = scheduler.commit(plan, say(plan, said, proposed=len(said)))
    return output


def test_a_prompt_is_fed_in_chunks_and_only_the_last_one_samples() -> None:
    scheduler = make(max_num_batched_tokens=6)
    scheduler.admit([make_request("a", [1] * 14)])
    rows = []
    for _ in range(3):
        plan = scheduler.schedule(OFF)
        rows += plan.rows
        scheduler.commit(plan, say(plan, *[[2]] * plan.rows[0].samples))
    assert [(row.start, row.length, row.samples) for row in rows] == [(0, 6, False), (6, 6, False), (12, 2, True)]
    assert [len(row.new_block_ids) for row in rows] == [2, 1, 1]
    (row,) = scheduler.schedule(OFF).rows
    assert (row.start, row.length, row.new_token_ids, row.known_len) == (14, 1, [2], 15)


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make(max_num_batched_tokens=64, enable_chunked_prefill=False)
    scheduler.admit([make_request("a", [1] * 40), make_request("b", [2] * 30)])
    assert [row.length for row in scheduler.schedule(OFF).rows] == [40]
    with pytest.raises(ConfigError, match="max_num_batched_tokens 63 is less than max_model_len 64"):
        make(max_num_batched_tokens=63, enable_chunked_prefill=False)


def test_accepted_drafts_move_the_computed_length_and_only_new_ids_are_told() -> None:
    scheduler = begun(make_request("a", [1] * 5))
    plan = scheduler.schedule(k_of(4))
    assert (plan.rows[0].start, plan.rows[0].k) == (5, 4)
    scheduler.commit(plan, say(plan, [5, 6, 7], proposed=4))
    (row,) = scheduler.schedule(k_of(4)).rows
    assert (row.start, row.length, row.known_len, row.new_token_ids) == (8, 1, 9, [5, 6, 7])


def test_guesses_stop_one_before_the_last_output_and_before_the_context_ends() -> None:
    scheduler = begun(make_request("a", [1] * 5, max_tokens=4))
    assert scheduler.schedule(k_of(9)).rows[0].k == 2
    scheduler = begun(make_request("a", [1] * 60, max_tokens=100))
    assert scheduler.schedule(k_of(9)).rows[0].k == 2


def test_guesses_shrink_to_the_budget_and_leave_every_row_its_token() -> None:
    scheduler = begun(*[make_request(name, [i + 1] * 4) for i, name in enumerate("abc")], max_num_batched_tokens=12)
    rows = scheduler.schedule(k_of(6)).rows
    assert [(row.length, row.k) for row in rows] == [(1, 6), (1, 3), (1, 0)]


def test_guesses_shrink_to_the_blocks_before_anything_is_preempted() -> None:
    info = WorkerInfo(num_blocks=4, block_size=4, max_model_len=16, vocab_size=10)
    scheduler = begun(make_request("a", [1] * 5), make_request("b", [2] * 3), info=info)
    rows = scheduler.schedule(k_of(7)).rows
    assert [(row.start, row.length, row.k) for row in rows] == [(5, 1, 6), (3, 1, 0)]
    assert scheduler.stats().preemptions == 0


def test_rows_without_guesses_hold_no_blocks_for_them() -> None:
    scheduler = begun(make_request("a", [1] * 3))
    assert scheduler.schedule(OFF).rows[0].new_block_ids == []
    scheduler = begun(make_request("a", [1] * 3))
    assert len(scheduler.schedule(k_of(4)).rows[0].new_block_ids) == 1


def play(policy: Policy) -> list[RoundPlan]:
    info = WorkerInfo(num_blocks=8, block_size=4, max_model_len=24, vocab_size=10)
    scheduler, worker = make(info, max_num_batched_tokens=7), FakeWorker(info, 8)
    scheduler.admit([make_request(str(i), [i, 1, 2, 3, 4, 5], max_tokens=12) for i in range(4)])
    while scheduler.num_unfinished:
        plan = scheduler.schedule(policy)
        scheduler.commit(plan, worker.run(plan))
    return worker.plans


def test_off_is_free_the_plans_are_those_of_an_engine_without_speculation() -> None:
    off = k_of(5, num_speculative_tokens_per_batch_size=((1, 100, 0),))
    assert play(off) == play(make_policy(None))
    assert play(k_of(5)) != play(OFF)


def test_the_youngest_is_preempted_and_comes_back_with_prompt_and_output() -> None:
    info = WorkerInfo(num_blocks=5, block_size=4, max_model_len=16, vocab_size=10)
    scheduler = begun(make_request("a", [1] * 7), make_request("b", [2] * 7), info=info)
    plan = scheduler.schedule(OFF)
    scheduler.commit(plan, say(plan, [3], [4]))
    plan = scheduler.schedule(OFF)
    assert [row.start for row in plan.rows] == [8]
    assert scheduler.stats().preemptions == 1
    scheduler.commit(plan, say(plan, [EOS]))
    plan = scheduler.schedule(OFF)
    assert [new.token_ids for new in plan.new] == [(*[2] * 7, 0, 4)]
    assert (plan.new[0].prompt_len, plan.rows[0].new_token_ids) == (7, [])
    assert (plan.rows[0].start, plan.rows[0].length) == (8, 1), "its full blocks were still there"


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    scheduler = begun(make_request("a", [1] * 9))
    scheduler.admit([make_request("b", [1] * 9), make_request("c", [1] * 9, cache_salt="x")])
    rows = scheduler.schedule(OFF).rows
    assert [(row.start, row.length) for row in rows] == [(9, 1), (8, 1), (0, 9)]
    stats = scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (27, 8, 27)


def test_prompt_logprobs_or_a_switched_off_cache_read_nothing_from_it() -> None:
    scheduler = begun(make_request("a", [1] * 9))
    scheduler.admit([make_request("b", [1] * 9, prompt_logprobs=0)])
    assert scheduler.schedule(OFF).rows[1].start == 0
    scheduler = begun(make_request("a", [1] * 9), cache=CacheConfig(enable_prefix_caching=False))
    scheduler.admit([make_request("b", [1] * 9)])
    assert scheduler.schedule(OFF).rows[1].start == 0


def test_prompt_logits_are_bounded_however_many_rows_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PROMPT_LOGITS", 9 * INFO.vocab_size)
    scheduler, worker = make(), FakeWorker(INFO, 8)
    prompts = {"a": [1] * 14, "b": [2] * 7, "c": [3] * 5}
    scheduler.admit([make_request(name, prompt, prompt_logprobs=0) for name, prompt in prompts.items()])
    scheduler.admit([make_request("plain", [4] * 20, max_tokens=1)])
    emitted: dict[str, list[int]] = {name: [] for name in [*prompts, "plain"]}
    lengths = []
    while scheduler.num_unfinished:
        plan = scheduler.schedule(k_of(3))
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
    scheduler = make(info, enable_chunked_prefill=chunked)
    scheduler.admit([make_request("a", [1] * 3, prompt_logprobs=0), make_request("b", [1] * 3, prompt_logprobs=0)])
    plan = scheduler.schedule(OFF)
    assert [(row.length, row.samples) for row in plan.rows] == [(1, False)]
    scheduler.commit(plan, [])
    plan = scheduler.schedule(OFF)
    assert [(row.start, row.length) for row in plan.rows] == [(1, 1)]
    scheduler.commit(plan, [])
    plan = scheduler.schedule(OFF)
    assert [(row.start, row.length, row.samples) for row in plan.rows] == [(2, 1, True), (0, 1, False)]


@pytest.mark.parametrize(
    ("options", "kept", "text", "reason", "stop_reason"),
    [
        ({}, [0, 1, EOS], "ab", "stop", None),
        ({"ignore_eos": True}, [0, 1, EOS, 2, 5], "abcx", "length", None),
        ({"stop_token_ids": [1]}, [0, 1], "a", "stop", 1),
        ({"stop_token_ids": [1], "include_stop_str_in_output": True}, [0, 1], "ab", "stop", 1),
        ({"stop": ["b"]}, [0, 1], "a", "stop", "b"),
        ({"stop": ["b"], "include_stop_str_in_output": True}, [0, 1], "ab", "stop", "b"),
        ({"stop": ["ab"], "min_tokens": 2}, [0, 1, EOS], "ab", "stop", None),
        ({"skip_special_tokens": False, "ignore_eos": True}, [0, 1, EOS, 2, 5], "ab<e>cx", "length", None),
        ({"detokenize": False}, [0, 1, EOS], "", "stop", None),
    ],
)
def test_what_lies_behind_the_end_exists_nowhere(
    options: dict[str, object], kept: list[int], text: str, reason: str, stop_reason: object
) -> None:
    output = end_with([0, 1, EOS, 2, 5], make_request("a", [3, 3], max_tokens=5, params=SamplingParams(**options)))
    assert (list(output.token_ids), output.text) == (kept, text)
    assert (output.finish_reason, output.stop_reason) == (reason, stop_reason)
    assert [entry.token_ids[0] for entry in output.logprobs] == kept
    assert output.speculation.accepted == min(4, len(kept))
    assert output.speculation.proposed <= len(kept)


def test_the_cache_learns_nothing_from_behind_the_end() -> None:
    scheduler = make()
    scheduler.admit([make_request("a", [3, 3])])
    plan = scheduler.schedule(k_of(7))
    scheduler.commit(plan, say(plan, [0, EOS, 1, 1, 1, 1, 1], proposed=7))
    scheduler.check_integrity()
    scheduler.admit([make_request("b", [3, 3, 0, EOS, 1, 1, 1, 1, 1, 1])])
    assert scheduler.schedule(OFF).rows[0].start == 4


def test_max_tokens_and_the_context_end_a_request() -> None:
    assert end_with([0], make_request("a", [1], max_tokens=1)).finish_reason == "length"
    assert end_with([0], make_request("a", [1] * 63, max_tokens=9)).finish_reason == "length"


def test_acceptance_is_counted_by_request_and_by_position() -> None:
    scheduler = begun(make_request("a", [1], max_tokens=9))
    for said, proposed in (([2, 2, 2], 3), ([2], 3), ([EOS], 0)):
        plan = scheduler.schedule(k_of(3))
        (output,) = scheduler.commit(plan, say(plan, said, proposed=proposed))
    assert output.speculation == SpeculationStats(2, 6, 2, (1, 1, 0))
    stats = scheduler.stats()
    assert (stats.proposed, stats.accepted, stats.accepted_per_pos, stats.drafting_rounds) == (6, 2, (1, 1, 0), 2)
    assert (stats.steps, stats.generated_tokens, stats.num_running) == (4, 6, 0)


def test_a_failed_row_ends_alone_and_its_blocks_are_not_trusted() -> None:
    scheduler = make()
    scheduler.admit([make_request("a", [1] * 9), make_request("b", [2] * 9)])
    plan = scheduler.schedule(OFF)
    first, second = say(plan, [0], [0])
    outputs = scheduler.commit(plan, [Verdict(first.slot, failed="its logits were NaN"), second])
    assert [(o.request_id, o.finish_reason, o.error) for o in outputs] == [
        ("a", "error", "its logits were NaN"),
        ("b", None, None),
    ]
    scheduler.admit([make_request("c", [1] * 9)])
    assert [row.start for row in scheduler.schedule(OFF).rows] == [9, 0]


def test_a_row_without_a_verdict_is_an_error_of_that_row() -> None:
    scheduler = make()
    scheduler.admit([make_request("a", [1])])
    (output,) = scheduler.commit(scheduler.schedule(OFF), [])
    assert output.finish_reason == "error"
    assert "no verdict" in output.error


def test_aborts_free_blocks_at_once_and_are_skipped_by_a_commit_under_way() -> None:
    scheduler = begun(make_request("a", [1] * 9), make_request("b", [2] * 9))
    plan = scheduler.schedule(OFF)
    (output,) = scheduler.admit([Abort(("a", "unknown"))])
    assert (output.request_id, output.finish_reason, output.text) == ("a", "abort", "")
    scheduler.check_integrity()
    assert [o.request_id for o in scheduler.commit(plan, say(plan, [3], [4]))] == ["b"]


def test_samples_of_one_prompt_read_it_once() -> None:
    scheduler = make(max_num_batched_tokens=6)
    prompt = [1, 2, 3] * 4
    scheduler.admit([make_request(f"a-{sample}", prompt) for sample in range(3)] + [make_request("b", [5])])
    fed = []
    for said in ([], [[0]], [[0]] * 2):
        plan = scheduler.schedule(OFF)
        fed.append([(row.start, row.length) for row in plan.rows])
        scheduler.commit(plan, say(plan, *said))
        scheduler.check_integrity()
    assert fed == [[(0, 6)], [(6, 6)], [(12, 1), (8, 4), (8, 1)]]
    assert scheduler.stats().prefix_hits == 16


def test_samples_do_not_wait_for_what_they_could_not_share() -> None:
    def rows_of(*requests: Request, **options: object) -> int:
        scheduler = make(**options)
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
    scheduler = make()
    long, empty, nothing = scheduler.admit(
        [make_request("a", [1] * 64), make_request("b", []), make_request("c", [1], max_tokens=0)]
    )
    assert long.error == "the prompt has 64 tokens; with max_model_len 64 it must have 1 to 63"
    assert "0 tokens" in empty.error
    assert "max_tokens is 0" in nothing.error
    assert not scheduler.schedule(OFF).rows
    with pytest.raises(ConfigError, match="max_model_len 64 is more than the 32 tokens that 8 KV blocks of 4 hold"):
        make(WorkerInfo(8, 4, 64, 10))


def test_a_second_arrival_of_an_id_does_not_disturb_the_first() -> None:
    scheduler = begun(make_request("a", [1]))
    assert scheduler.admit([make_request("a", [2])]) == []
    assert scheduler.num_unfinished == 1
    scheduler.check_integrity()


class Scripted:
    """A proposer beside the controller that says what it was told to say."""

    on_worker = False

    def __init__(self, *tokens: int) -> None:
        self.tokens, self.asked = tokens, []

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.asked += [(row.k, list(row.token_ids)) for row in rows]
        if not self.tokens:
            raise ValueError("nothing to say")
        return [Draft(self.tokens) for _ in rows]


def test_drafts_made_beside_the_controller_ride_in_the_plan() -> None:
    proposer = Scripted(5, 6)
    scheduler = begun(make_request("a", [1, 2]), proposers=[proposer])
    (row,) = scheduler.schedule(k_of(4)).rows
    assert (row.draft, row.k, proposer.asked) == (Draft((5, 6)), 2, [(4, [1, 2, 0])])


@pytest.mark.parametrize(
    ("tokens", "usable"), [((5, 6, 7, 8, 9), (5, 6, 7)), ((5, 10, 6), (5,)), ((-1,), None), ((), None)]
)
def test_a_bad_draft_costs_guesses_and_nothing_else(tokens: tuple[int, ...], usable: tuple[int, ...] | None) -> None:
    scheduler = begun(make_request("a", [1, 2]), proposers=[Scripted(*tokens)])
    (row,) = scheduler.schedule(k_of(3)).rows
    assert row.draft == (Draft(usable) if usable else None)
    assert row.k == len(usable or ())
    assert scheduler.stats().draft_failures == (not tokens)


class Broken(InOneProcess):
    def run(self, plan: RoundPlan) -> list[Verdict]:
        raise OSError("device lost")


def test_controller_runs_requests_to_their_end() -> None:
    inbox = LocalInbox()
    controller = Controller(make(), k_of(3), FakeWorker(INFO, 8), inbox)
    assert controller.step() == []
    inbox.put([make_request("a", [1, 2]), make_request("b", [1, 2], max_tokens=3)])
    ended = {}
    while len(ended) < 2:
        ended |= {o.request_id: o.finish_reason for o in controller.step() if o.finish_reason}
    assert set(ended) == {"a", "b"}
    inbox.put([make_request("c", [1]), Abort(("c",))])
    assert [o.finish_reason for o in controller.step()] == ["abort"]
    assert controller.stats().num_running == 0


def test_a_dead_executor_ends_every_request_with_an_error() -> None:
    inbox = LocalInbox()
    controller = Controller(make(max_num_seqs=1), OFF, Broken(), inbox)
    inbox.put([make_request("a", [1]), make_request("b", [1])])
    with pytest.raises(EngineDeadError, match="round 0: OSError: device lost"):
        controller.step()
    assert [(o.request_id, o.finish_reason) for o in controller.final_outputs] == [("a", "error"), ("b", "error")]
    assert controller.scheduler.num_unfinished == 0


class Listening(Scripted, SequenceListener):
    """A proposer that follows sequences, and writes down what it is told."""

    def __init__(self, *tokens: int) -> None:
        super().__init__(*tokens)
        self.told: list[tuple[object, ...]] = []

    def begin(self, key: int, request: Request) -> None:
        self.told.append(("begin", key, request.request_id))

    def grow(self, key: int, token_ids: Sequence[int], probed: Sequence[int]) -> None:
        self.told.append(("grow", key, tuple(token_ids), tuple(probed)))

    def end(self, key: int, token_ids: Sequence[int]) -> None:
        self.told.append(("end", key, tuple(token_ids)))

    def prepare(self) -> None:
        self.told.append(("prepare",))


def test_a_follower_is_told_of_every_sequence_from_arrival_to_end() -> None:
    follower = Listening(5, 6)
    scheduler = make(proposers=[follower])
    scheduler.admit([make_request("a", [1, 2], max_tokens=2), make_request("b", [3])])
    plan = scheduler.schedule(OFF)
    scheduler.commit(plan, say(plan, [0], [4]))
    plan = scheduler.schedule(k_of(2))
    verdicts = [structs.replace(verdict, probed=[8]) for verdict in say(plan, [5, 7], [5], proposed=1)]
    scheduler.commit(plan, verdicts)
    scheduler.admit([Abort(("b",))])
    assert follower.told == [
        ("begin", 1, "a"),
        ("begin", 2, "b"),
        ("grow", 1, (0,), ()),
        ("grow", 2, (4,), ()),
        # What lies behind the end of a sequence was never said.
        ("grow", 1, (5,), (8,)),
        ("end", 1, (1, 2, 0, 5)),
        ("grow", 2, (5,), (8,)),
        ("prepare",),
        ("end", 2, (3, 4, 5)),
    ]


def test_in_a_cascade_the_first_with_a_guess_supplies_it_and_a_worker_the_rest() -> None:
    silent, second = Scripted(-1), Scripted(5)
    requests = [make_request("a", [1, 2]), make_request("b", [3])]
    scheduler = begun(*requests, proposers=[silent, second])
    assert [row.draft for row in scheduler.schedule(k_of(3)).rows] == [Draft((5,))] * 2
    assert (len(silent.asked), len(second.asked)) == (2, 2)
    for has_worker, k in ((True, 3), (False, 0)):
        scheduler = begun(*requests, proposers=[silent], has_worker=has_worker)
        assert [(row.draft, row.k) for row in scheduler.schedule(k_of(3)).rows] == [(None, k)] * 2


def test_proposers_beside_the_controller_do_without_a_draft_that_is_down() -> None:
    down = DraftService(is_up=False, epoch=1)
    scheduler = begun(make_request("a", [1, 2]), proposers=[Scripted(5)], has_worker=True)
    assert scheduler.schedule(k_of(3), down).rows[0].draft == Draft((5,))
    scheduler = begun(make_request("a", [1, 2]), proposers=[Scripted(-1)], has_worker=True)
    assert scheduler.schedule(k_of(3), down).rows[0].k == 0


def test_a_follower_that_fails_costs_guesses_and_nothing_else() -> None:
    class Failing(Listening):
        def begin(self, key: int, request: Request) -> None:
            raise ValueError("not today")

    scheduler = begun(make_request("a", [1, 2]), proposers=[Failing(5)])
    assert scheduler.schedule(k_of(3)).rows[0].draft == Draft((5,))
    assert scheduler.stats().draft_failures == 1
