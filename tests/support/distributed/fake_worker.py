"""A worker whose KV cache records the content of each entry, so that stale or foreign entries are detected.

Its language model is a deterministic function of the prefix found in that cache: whatever the scheduler
does, a request must return the tokens that `reference` computes without a scheduler.
"""

import random
from collections.abc import Callable, Sequence

import msgspec
from tokenizers import AddedToken, Tokenizer, decoders, models

from protos.draft import Draft, DraftRow
from protos.messages import Request, RoundPlan, Row, Sampling, TokenLogprobs, Verdict, WorkerInfo
from protos.sampling import SamplingParams
from tests.support.in_one_process import InOneProcess
from tests.support.tree_proposer import accept_without_probes, nonsense, random_tree
from workers.slots import SlotTable

VOCAB = ["a", "b", "c", "ab", "bc", "x", "Ã", "©", "Ġ", "<e>"]
EOS = 9
ROOT = 0


def tiny_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of `VOCAB`; "Ã" and "©" are the two bytes of "é"."""
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(VOCAB)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<e>", special=True)])
    return tokenizer


def extend(prefix: int, token_id: int) -> int:
    """Return the content hash of a prefix one token longer."""
    return hash((prefix, int(token_id)))


def target_token(prefix: int) -> int:
    """Return the model's token after this prefix; `EOS` is rare."""
    number = random.Random(prefix).randrange(60)
    return EOS if number == 0 else number % EOS


def contents(token_ids: Sequence[int]) -> list[int]:
    """Return the content hash of every position."""
    found, prefix = [], ROOT
    for token_id in token_ids:
        prefix = extend(prefix, token_id)
        found.append(prefix)
    return found


def guess(prefix: int, k: int, skill: float, dice: random.Random) -> list[int]:
    """Draft *k* tokens, each right with probability *skill*."""
    drafted = []
    for _ in range(k):
        drafted.append(target_token(prefix) if dice.random() < skill else dice.randrange(len(VOCAB)))
        prefix = extend(prefix, drafted[-1])
    return drafted


class FakeProposer:
    """Proposes up to k tokens in the controller process, each right with probability *skill*."""

    on_worker = False

    def __init__(self, seed: int, skill: float = 0.7) -> None:
        self.dice, self.skill = random.Random(seed), skill

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        return [self._one(row) for row in rows]

    def _one(self, row: DraftRow) -> Draft:
        prefix = contents(row.token_ids)[-1]
        return Draft(tuple(guess(prefix, self.dice.randint(0, row.k), self.skill, self.dice)))


class FakeTreeProposer(FakeProposer):
    """Proposes trees in the controller process, some of them invalid."""

    def _one(self, row: DraftRow) -> Draft:
        if self.dice.random() < 0.1:
            return nonsense(row.k, len(VOCAB), self.dice)
        return tree(contents(row.token_ids)[-1], self.dice.randint(1, row.k), self.dice)


def tree(prefix: int, size: int, dice: random.Random) -> Draft:
    """Return a random tree around the true continuation of *prefix*."""
    return random_tree(guess(prefix, size, 1.0, dice), size, len(VOCAB), dice)


class FakeWorker(InOneProcess):
    """An `Executor` without a model. Raises AssertionError if a row reads a wrong KV entry or recurrent state.

    Rows without a draft are drafted here: as chains, or as trees if *plants*. Recurrent states are checked where *info*
    has any.
    """

    def __init__(
        self, info: WorkerInfo, num_slots: int, seed: int = 0, skill: float = 0.7, *, plants: bool = False
    ) -> None:
        self.info, self.plants = info, plants
        self.slots = SlotTable(num_slots, info.max_model_len, info.block_size)
        self.store: dict[tuple[int, int], tuple[int, int]] = {}
        self.named: dict[tuple[int, int, int], int] = {}
        self.states: dict[int, dict[int, int]] = {}  # of each slot, by position
        self.kept_states: dict[int, int] = {}
        self.dice, self.skill = random.Random(seed), skill
        self.fail_next = False
        self.plans: list[RoundPlan] = []

    def start(self) -> WorkerInfo:
        return self.info

    def shutdown(self) -> None:
        pass

    def run(self, plan: RoundPlan) -> list[Verdict]:
        self.plans.append(plan)
        self.slots.apply(plan)
        self._move(plan.moves)
        for row in plan.rows:
            self._check_row(row)
        verdicts = [self._forward(row) for row in plan.rows]
        return [verdict for verdict in verdicts if verdict is not None]

    def _place(self, slot: int, position: int) -> tuple[tuple[int, int], int]:
        index, offset = divmod(position, self.info.block_size)
        assert index < self.slots.num_blocks[slot], f"slot {slot} has no block for position {position}"
        return (int(self.slots.blocks[slot, index]), offset), int(self.slots.versions[slot, index])

    def _check_row(self, row: Row) -> None:
        known = contents(self.slots.tokens[row.slot, : row.known_len])
        for position in range(row.start):
            place, version = self._place(row.slot, position)
            assert self.store.get(place) == (version, known[position]), f"wrong KV at position {position} of {row}"
            named = self.named.setdefault((*place, version), known[position])
            assert named == known[position], f"block {place[0]} had other content under version {version}"
        if self.info.prefix_states is not None and row.start:
            states = self.states.get(row.slot, {})
            state = states.get(row.start) if row.state_from < 0 else self.kept_states.get(row.state_from)
            assert state == known[row.start - 1], f"wrong state before {row}"

    def _write(self, slot: int, position: int, content: int) -> None:
        place, version = self._place(slot, position)
        self.store[place] = (version, content)

    def _move(self, moves: Sequence[int]) -> None:
        """Move entries; the versions of blocks stay."""
        places = [divmod(place, self.info.block_size) for place in moves]
        found = [self.store[place][1] for place in places[::2]]
        assert len(set(places[1::2])) == len(found), "a place is written twice"
        for place, content in zip(places[1::2], found, strict=True):
            self.store[place] = (self.store[place][0], content)

    def _feed(self, slot: int, start: int, token_ids: Sequence[int]) -> list[int]:
        """Write the KV of tokens at `start ...`; return the content hash at each."""
        prefix = self.store[self._place(slot, start - 1)[0]][1] if start else ROOT
        found = []
        for position, token_id in enumerate(token_ids, start):
            prefix = extend(prefix, token_id)
            self._write(slot, position, prefix)
            found.append(prefix)
        return found

    def _forward(self, row: Row) -> Verdict | None:
        slot, end = row.slot, row.start + row.length
        fed = self._feed(slot, row.start, self.slots.tokens[slot, row.start : end].tolist())
        prompt = self._prompt_logprobs(row)
        self._keep_states(row, ())
        if not row.samples:
            return None if prompt is None else Verdict(slot, prompt_logprobs=prompt)
        if self.fail_next:
            self.fail_next = False
            return Verdict(slot, failed="not a number")
        return self._verify(row, fed[-1], prompt)

    def _verify(self, row: Row, prefix: int, prompt: list[TokenLogprobs] | None) -> Verdict:
        draft = row.draft or self._draft(prefix, row.k)
        assert len(draft) <= row.k
        after = [prefix, *self._feed_draft(row, prefix, draft)]
        self._keep_states(row, draft.tokens)
        said = [target_token(content) for content in after]
        path = accept_without_probes(draft, said)
        kept = [said[0], *(said[1 + node] for node in path)]
        logprobs = [TokenLogprobs([token], [0.0], [1]) for token in kept]
        guesses = draft.widths()
        verdict = Verdict(row.slot, kept, sum(guesses), path, logprobs, prompt)
        probed = [said[1 + node] for node, is_probe in enumerate(draft.probes) if is_probe]
        return verdict if draft.is_chain else msgspec.structs.replace(verdict, widths=guesses, probed=probed)

    def _keep_states(self, row: Row, drafted: Sequence[int]) -> None:
        """Keep the states after the row's last known token but one and all that follow, and those that it names."""
        end = row.start + row.length
        after = [ROOT, *contents([*self.slots.tokens[row.slot, :end].tolist(), *drafted])]
        self.states[row.slot] = {position: after[position] for position in range(end - row.samples, len(after))}
        for position, number in zip(row.states_to[::2], row.states_to[1::2], strict=True):
            assert row.start < position <= end + row.k
            assert 0 <= number < (self.info.prefix_states or 0)
            if position < len(after):
                self.kept_states[number] = after[position]

    def _draft(self, prefix: int, k: int) -> Draft:
        if self.plants and k:
            return tree(prefix, self.dice.randint(1, k), self.dice).valid_prefix(k, len(VOCAB))
        return Draft(tuple(guess(prefix, k, self.skill, self.dice)))

    def _feed_draft(self, row: Row, prefix: int, draft: Draft) -> list[int]:
        """Write the KV of a draft's nodes after the known tokens; return the content hash at each."""
        found: list[int] = []
        for node, (token, parent) in enumerate(zip(draft.tokens, draft.node_parents(), strict=True)):
            found.append(extend(prefix if parent < 0 else found[parent], token))
            self._write(row.slot, row.known_len + node, found[-1])
        return found

    def _prompt_logprobs(self, row: Row) -> list[TokenLogprobs] | None:
        prompt_len = int(self.slots.prompt_len[row.slot])
        if self.slots.sampling[row.slot].prompt_logprobs is None or row.start >= prompt_len - 1:
            return None
        last = min(row.start + row.length, prompt_len - 1)
        predicted = self.slots.tokens[row.slot, row.start + 1 : last + 1].tolist()
        return [TokenLogprobs([token], [0.0], [1]) for token in predicted]


def make_request(name: str, prompt: Sequence[int], max_tokens: int = 8, **options: object) -> Request:
    """Return a request; options are those of `Request`, `params` a `SamplingParams`, `prompt_logprobs` a count."""
    sampling = Sampling(seed=0, prompt_logprobs=options.pop("prompt_logprobs", None))
    params = options.pop("params", None) or SamplingParams()
    fields = {"eos_ids": (EOS,), **options}
    return Request(name, tuple(prompt), params, sampling, max_tokens, **fields)


def reference(request: Request, max_model_len: int, decode: Callable[[list[int]], str]) -> tuple[list[int], str, str]:
    """Return the ids, text and finish reason of plain decoding, one token at a time."""
    params, prefix, out = request.params, contents(request.prompt_token_ids)[-1], []
    while True:
        out.append(target_token(prefix))
        prefix = extend(prefix, out[-1])
        is_eos = out[-1] in request.eos_ids and not params.ignore_eos
        if is_eos or out[-1] in params.stop_token_ids:
            return out, decode(out if params.include_stop_str_in_output else out[:-1]), "stop"
        starts = _new_matches(out, params.stop, decode) if len(out) > params.min_tokens else []
        if starts:
            start, stop = min(starts, key=lambda match: match[0])
            return out, decode(out)[: start + len(stop) * params.include_stop_str_in_output], "stop"
        if len(out) >= request.max_tokens or len(request.prompt_token_ids) + len(out) >= max_model_len:
            return out, decode(out), "length"


def _new_matches(out: list[int], stops: Sequence[str], decode: Callable[[list[int]], str]) -> list[tuple[int, str]]:
    """Return the stop strings that the last token completed, and their positions."""
    before, now = decode(out[:-1]), decode(out)
    return [
        (start, stop)
        for stop in stops
        for start in range(len(now))
        if now.startswith(stop, start) and not before.startswith(stop, start)
    ]
