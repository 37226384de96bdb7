"""Random operations on a scheduler, over a worker that checks every KV entry."""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protos.config.engine import CacheConfig, SchedulerConfig, SpeculativeConfig
from protos.messages import Abort, Request, RoundPlan, TokenOutput, WorkerInfo
from protos.sampling import SamplingParams
from runtime.core.scheduler import Scheduler
from runtime.policy.base import NoSpeculation
from runtime.policy.batch_size import BatchSizePolicy
from runtime.text.detokenizer import DetokenizerFactory
from tests.support.distributed.fake_worker import (
    EOS,
    VOCAB,
    FakeProposer,
    FakeTreeProposer,
    FakeWorker,
    make_request,
    reference,
    tiny_tokenizer,
)

TOKENIZER = tiny_tokenizer()
BEGUN, CONTINUED = 6, 7
"""The two bytes of "é"."""
STOPS = [(), ("ab",), ("é", "bca"), ("cab ", "b", "xx"), ("ab", "abc")]


def decode_after(prompt: Sequence[int], ids: list[int]) -> str:
    """Return the text of *ids*, with the character that *prompt* began, if they continue it."""
    first = next((token for token in ids if token != EOS), None)
    is_whole = prompt[-1] == BEGUN and first == CONTINUED
    return TOKENIZER.decode([BEGUN, *ids] if is_whole else ids)


class Lives(RuleBasedStateMachine):
    """Requests arrive, run, are preempted, aborted and fail; their outputs depend on none of it."""

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        draw = data.draw
        block_size = draw(st.integers(1, 4))
        max_model_len = draw(st.integers(12, 24))
        num_blocks = -(-max_model_len // block_size) + draw(st.integers(0, 5))
        chunked = draw(st.booleans())
        self.budget = draw(st.integers(2, 12) if chunked else st.integers(max_model_len, 2 * max_model_len))
        num_seqs = draw(st.integers(1, 5))
        states = draw(st.none() | st.integers(0, 6))
        self.info = WorkerInfo(
            num_blocks,
            block_size,
            max_model_len,
            len(VOCAB),
            speculates=True,
            prefix_states=states,
            rows_ahead=draw(st.sampled_from([0, 2, 5])),
        )
        self.begun: dict[int, int] = {}
        seed = draw(st.integers(0, 1000))
        self.k = draw(st.integers(0, 5))
        only_chains = states is not None
        self.policy = NoSpeculation()
        if self.k:
            limit = draw(st.none() | st.integers(1, 4))
            config = SpeculativeConfig(method="any", num_speculative_tokens=self.k, disable_by_batch_size=limit)
            self.policy = BatchSizePolicy(config)
        self.scheduler = Scheduler(
            SchedulerConfig(num_seqs, self.budget, chunked),
            CacheConfig(block_size, enable_prefix_caching=draw(st.booleans())),
            self.info,
            proposers=draw(st.sampled_from([[], [FakeProposer(seed)], [FakeTreeProposer(seed)]][: 3 - only_chains])),
            detokenizers=DetokenizerFactory(TOKENIZER),
        )
        self.scheduler._planner._max_scored = draw(st.sampled_from([1, 3, 7, 1000]))
        skill, plants = draw(st.sampled_from([0.0, 0.7, 1.0])), draw(st.booleans()) and not only_chains
        self.worker = FakeWorker(self.info, num_seqs, seed, skill, plants=plants)
        self.live: dict[str, Request] = {}
        self.outputs: dict[str, list[TokenOutput]] = defaultdict(list)
        self.num_added = 0

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        draw = data.draw
        stem = draw(st.sampled_from([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3], [0, 1, 2, 3, 8, 8, 8], [5] * 9]))
        prompt = stem[: draw(st.integers(1, len(stem)))] + draw(st.lists(st.integers(0, 8), max_size=2))
        prompt = prompt[: self.info.max_model_len - 1]
        params = SamplingParams(
            stop=draw(st.sampled_from(STOPS)),
            stop_token_ids=draw(st.sampled_from([(), (5,)])),
            include_stop_str_in_output=draw(st.booleans()),
            ignore_eos=draw(st.booleans()),
            min_tokens=draw(st.integers(0, 3)),
        )
        name = str(self.num_added)
        self.num_added += 1
        request = make_request(
            name,
            prompt,
            draw(st.integers(1, 14)),
            params=params,
            speculate=draw(st.booleans()),
            cache_salt=draw(st.sampled_from(["", "salt"])),
            prompt_logprobs=draw(st.sampled_from([None, None, 1])),
        )
        self.live[name] = request
        assert self.scheduler.admit([request]) == []

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        (output,) = self.scheduler.admit([Abort((name, name, "nobody"))])
        assert (output.request_id, output.finish_reason) == (name, "abort")
        del self.live[name]

    @precondition(lambda self: self.live)
    @rule()
    def fail_a_row(self) -> None:
        self.worker.fail_next = True

    @precondition(lambda self: self.live)
    @rule(times=st.integers(1, 5))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    def one_step(self) -> None:
        plan = self.scheduler.schedule(self.policy)
        assert (not plan.rows) == (not self.live)
        if not plan.rows:
            return
        self.check_plan(plan)
        self.check_begun(plan)
        verdicts = self.worker.run(plan)
        self.begun = self.places_after(plan)
        self.check_oldest(plan)
        for output in self.scheduler.commit(plan, verdicts):
            self.record(output)

    def check_plan(self, plan: RoundPlan) -> None:
        assert sum(row.length + row.k for row in plan.rows) <= self.budget
        assert len({row.slot for row in plan.rows}) == len(plan.rows)
        for row in plan.rows:
            assert row.k <= self.k and (row.samples or not row.k)
            assert not row.k or row.known_len + row.k < self.info.max_model_len
            assert row.samples == (row.start + row.length == row.known_len)

    def check_begun(self, plan: RoundPlan) -> None:
        """After a step that continues, no row is added, and all have the places that a step begun by then writes to."""
        if self.begun and len(plan.new) < len(plan.rows):  # else all its rows have ended
            assert not plan.new and not plan.moves
            assert all(self.begun[row.slot] > 0 for row in plan.rows)

    def places_after(self, plan: RoundPlan) -> dict[int, int]:
        """Return the places after the known tokens of each slot of a step that continues."""
        if not plan.continues:
            return {}
        assert len(plan.rows) <= self.info.rows_ahead and plan.decodes and not any(row.k for row in plan.rows)
        slots = [row.slot for row in plan.rows]
        return dict(zip(slots, self.worker.slots.room(np.array(slots)).tolist(), strict=True))

    def check_oldest(self, plan: RoundPlan) -> None:
        """The oldest request has a row in every plan, so no request starves."""
        prompt = next(iter(self.live.values())).prompt_token_ids
        assert tuple(self.worker.slots.tokens[plan.rows[0].slot, : len(prompt)]) == prompt

    def record(self, output: TokenOutput) -> None:
        self.outputs[output.request_id].append(output)
        if output.finish_reason is None:
            return
        request = self.live.pop(output.request_id)
        if output.finish_reason == "error":
            assert output.error == "not a number"
            return
        self.check_end(request, self.outputs.pop(output.request_id))

    def check_end(self, request: Request, outputs: list[TokenOutput]) -> None:
        decode = partial(decode_after, request.prompt_token_ids)
        ids, text, reason = reference(request, self.info.max_model_len, decode)
        assert [token for output in outputs for token in output.token_ids] == ids
        assert "".join(output.text for output in outputs) == text
        assert [entry.token_ids[0] for output in outputs for entry in output.logprobs or ()] == ids
        assert [output.finish_reason for output in outputs] == [None] * (len(outputs) - 1) + [reason]
        asked = request.prompt_token_ids[1:] if request.sampling.prompt_logprobs is not None else ()
        assert tuple(e.token_ids[0] for output in outputs for e in output.prompt_logprobs or ()) == asked
        stats = outputs[-1].speculation
        assert stats.accepted <= min(stats.proposed, len(ids)) and sum(stats.accepted_per_pos) == stats.accepted
        assert request.speculate or not stats.proposed

    @invariant()
    def blocks_and_queues_agree(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        budget = 40 * self.num_added + 1
        while self.live:
            budget -= 1
            assert budget > 0, f"{len(self.live)} requests starve"
            self.one_step()
        self.scheduler.check_integrity()
        assert self.scheduler.stats().kv_usage == 0.0
        assert not self.scheduler.schedule(self.policy).rows


def run_machine(examples: int, steps: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    quick = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(Lives, settings=quick)


def test_scheduler_lives() -> None:
    run_machine(examples=100, steps=25)


@pytest.mark.full
def test_scheduler_lives_for_long() -> None:
    run_machine(examples=1000, steps=60)
