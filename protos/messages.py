"""Messages between the controller and its workers, and between frontends and the controller.

All are frozen msgspec structs: they cross processes as msgpack, never as pickle. Token ids are plain
ints; positions count from 0 over prompt + output; blocks are indices into every worker's KV cache.
"""

from collections.abc import Sequence as Seq
from typing import Literal

import msgspec

from protos.draft import ANY_DEPTH, Draft
from protos.layers import Needs
from protos.sampling import SamplingParams

Kind = Literal["json_schema", "regex", "lark"]


class Grammar(msgspec.Struct, frozen=True, gc=False):
    """The format that an answer must have, as text for the grammar library: see `protos.guidance`."""

    kind: Kind
    text: str


class Sampling(msgspec.Struct, frozen=True, gc=False):
    """The sampling options of a request, resolved and validated.

    `top_k` 0 and `temperature` 0.0 mean off and greedy. `stop_ids` are masked for the first `min_tokens` tokens.
    `logprobs` and `prompt_logprobs` are numbers of top tokens, None for no log-probabilities. `grammar` constrains the
    output. `allowed_ids` is a set of ids: a bit for each, the least significant first.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_ids: bytes | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    @property
    def needs_host(self) -> bool:
        """Whether GPUs do not sample alone: for log-probabilities, grammars, masks, and a bias of logits."""
        found = (self.logprobs, self.prompt_logprobs, self.grammar, self.allowed_ids)
        return any(each is not None for each in found) or bool(self.logit_bias or self.bad_words or self.min_tokens)


class Request(msgspec.Struct, frozen=True, gc=False):
    """One sequence to generate, validated and tokenised. `n > 1` is n requests of one group.

    `cache_salt` separates the prefix caches and suffix caches of tenants. `prediction_token_ids` is the answer that the
    user expects, which is drafted from before the methods are asked; may be empty. With `wants_steps`, outputs have
    `TokenOutput.step`. `num_speculative_tokens` and `method` restrict the engine's speculation: fewer draft tokens,
    one method of a cascade.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    sampling: Sampling
    max_tokens: int
    eos_ids: tuple[int, ...] = ()
    speculate: bool = True
    cache_salt: str = ""
    prediction_token_ids: tuple[int, ...] = ()
    wants_steps: bool = False
    num_speculative_tokens: int | None = None
    method: str | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop these requests; their blocks are freed within one step."""

    request_ids: tuple[str, ...]


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position, from the model's raw logits.

    The chosen token comes first, then the top ones, best first. `ranks[i]` is 1 + the number of more likely tokens.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class NewSequence(msgspec.Struct, frozen=True, gc=False):
    """A sequence that takes a worker slot, with all its tokens: prompt + output so far.

    `generation`, from 1 on, is never reused: workers compare it to detect that a slot has a new sequence. 0 if it is
    not compared.
    """

    slot: int
    token_ids: Seq[int]
    prompt_len: int
    sampling: Sampling
    generation: int = 0


class Row(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a round: feed known tokens `start .. start + length`, then `k` drafts.

    Attributes:
        slot: the sequence's index in every worker's tables.
        start: position of the first token fed; everything before it is in the KV cache.
        length: known tokens fed, at least 1.
        k: draft tokens wanted, or `len(draft)` if the draft is part of the plan.
        samples: whether the last known token is fed, so that the row samples.
        new_token_ids: committed ids not sent to the workers before, ending at position `known_len - 1`. They override
            the worker's own.
        known_len: number of known tokens, prompt + output.
        new_block_ids / new_block_versions: blocks appended to the sequence's table. A block's version
            changes whenever its content is discarded, so (id, version) identifies its content.
        draft: proposed in the controller process, or None: the draft worker proposes.
        depth: most levels of a draft: one fewer than the tokens still to come.
        source: which of the sources of drafts it is from, in the order in which they are asked; for the policy.
        state_from: number of the kept recurrent state that the row begins with; -1: with the slot's own.
        states_to: positions, each with the number of the state that keeps what the recurrent layers have after it:
            position, number, position, number ...
    """

    slot: int
    start: int
    length: int
    known_len: int
    k: int = 0
    samples: bool = True
    new_token_ids: Seq[int] = ()
    new_block_ids: Seq[int] = ()
    new_block_versions: Seq[int] = ()
    draft: Draft | None = None
    depth: int = ANY_DEPTH
    source: int = 0
    state_from: int = -1
    states_to: Seq[int] = ()


class RoundPlan(msgspec.Struct, frozen=True, gc=False):
    """One step for every worker. `new` sequences come before `rows` that use them.

    `moves` are K/V entries that every target rank moves first: from, to, from, to ..., each an index into the cache
    (block * block_size + offset). All are read before the first is written. They move the accepted path of a tree to
    the positions of a chain. `speculates`: the draft model may propose in this round. `least_survival`: the smallest
    probability to be accepted with which a draft token pays, where `assistant_confidence_threshold` is "auto".
    `continues`: workers may begin the next round before its plan: it has the rows that do not end, without drafts.
    """

    round: int
    rows: Seq[Row]
    new: Seq[NewSequence] = ()
    epoch: int = 0
    moves: Seq[int] = ()
    speculates: bool = False
    least_survival: float = 0.0
    continues: bool = False

    @property
    def decodes(self) -> bool:
        """Whether all rows decode: each feeds its newest token, and none a part of a prompt."""
        return all(row.samples and row.length == 1 for row in self.rows)


class Verdict(msgspec.Struct, frozen=True, gc=False):
    """The result of a round for one row that samples, or the prompt log-probabilities of one that does not.

    Attributes:
        slot: as in the row.
        token_ids: accepted draft tokens followed by the target's own next token; empty for rows that
            do not sample, and for those that skip their turn, because their grammar's mask is not ready.
        proposed: draft tokens that were scored and could be accepted.
        path: accepted nodes of the draft, root to leaf; for a chain 0 .. accepted - 1.
        logprobs: one entry per token id, if requested.
        prompt_logprobs: entries for positions `start + 1 ...` of the prompt, if requested.
        failed: the reason why this row failed (NaN logits, for example), else None.
        probed: the target's next token after each probe of the draft, in order; -1 if there is none.
        widths: number of proposed tokens at each depth of a tree, from 1 on; empty for a chain.
    """

    slot: int
    token_ids: Seq[int] = ()
    proposed: int = 0
    path: Seq[int] = ()
    logprobs: Seq[TokenLogprobs] | None = None
    prompt_logprobs: Seq[TokenLogprobs] | None = None
    failed: str | None = None
    probed: Seq[int] = ()
    widths: Seq[int] = ()


def with_tree(verdict: Verdict, draft: Draft) -> Verdict:
    """Add the fields that only verdicts of trees have."""
    if draft.is_chain:
        return verdict
    widths = draft.widths()
    return msgspec.structs.replace(verdict, proposed=sum(widths), widths=widths)


class SpeculationStats(msgspec.Struct, frozen=True, gc=False):
    """Acceptance statistics of one request.

    `steps` counts rounds in which anything was proposed for it; index j of `accepted_per_pos` counts those whose j-th
    draft token, or one at depth j + 1 of a tree, was accepted.
    """

    steps: int = 0
    proposed: int = 0
    accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()


class Step(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Where the tokens of one step came from.

    The first `accepted` tokens were drafted; the one after them, if any, is the target's own. `proposed` draft tokens
    were scored, in a tree of `depth` levels; 0 if the step had no draft.
    """

    proposed: int = 0
    accepted: int = 0
    depth: int = 0


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """What one step added to one request. `finish_reason` is None while it runs.

    `text` is the new text that may be shown: whole characters, with nothing that could still turn out
    to be the beginning of a stop string. `step` is set if the request wants it. `queued_s`, set at the end of a request
    that ran, is the seconds it waited to be scheduled. `retry_after_s` is set with `error` if the request
    itself was fine: it may be sent again after so many seconds.
    """

    request_id: str
    token_ids: Seq[int] = ()
    text: str = ""
    logprobs: Seq[TokenLogprobs] | None = None
    prompt_logprobs: Seq[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    speculation: SpeculationStats | None = None
    error: str | None = None
    step: Step | None = None
    queued_s: float | None = None
    retry_after_s: float | None = None


class StepCosts(msgspec.Struct, frozen=True):
    """Seconds of one forward by number of tokens fed, measured in warm-up. Empty `draft_s`: drafting is free."""

    target_s: dict[int, float]
    draft_s: dict[int, float] = {}


class WorkerInfo(msgspec.Struct, frozen=True):
    """What a loaded executor reports to the controller.

    `num_blocks` is the minimum over workers; `max_model_len` is limited to what the cache holds. `costs` is None if not
    measured. `draft_needs` is which features the draft is fed; unless "none", it can draft only for rows that the
    target has computed. `draft_places` is how many places of a row's KV blocks drafting takes, where that is more than
    the draft's nodes. `methods` and `num_speculative_tokens` are what requests may choose from, set by the engine;
    empty and 0 without speculation. `dtype` is that of the target, such as "float32", and `kv_cache_dtype` that of its
    cached K and V, such as "int8"; both may be empty. `device` is "cpu" or "cuda". `prefix_states` is how many
    states of recurrent layers are kept for the prefix cache, which is off without any; None: the target has no such
    layers. `rows_ahead`: rounds of at most so many rows may be begun before their plan comes (`RoundPlan.continues`).
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    speculates: bool = False
    notes: tuple[str, ...] = ()
    costs: StepCosts | None = None
    draft_needs: Needs = "none"
    methods: tuple[str, ...] = ()
    num_speculative_tokens: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    device: str = "cpu"
    draft_places: int = 0
    prefix_states: int | None = None
    rows_ahead: int = 0

    @property
    def longest_sequence(self) -> int:
        """Most tokens of prompt and answer. The last one is never fed, so it needs no place in the cache."""
        return min(self.max_model_len, self.num_blocks * self.block_size + 1)
