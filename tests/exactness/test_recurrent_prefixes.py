"""Targets with recurrent layers and the prefix cache: the same tokens as `transformers`, under preemption and chunking.

Two waves of requests run on one engine. Those of the second repeat prompts of the first, and continue its outputs, so
that they begin with states kept while prompts were fed and while draft tokens were verified.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slipstream import LLM, SamplingParams
from tests.exactness.test_identity import NGRAM, mixed_prompts
from tests.exactness.test_recurrent import with_mtp
from tests.support.identity import Reference, assert_identical, collect, perturbed
from tests.support.models.tiny_models import build
from tests.support.policies import always
from tests.support.recurrent.tiny_hybrids import HYBRIDS

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("qwen3_next",)
COUNT = 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
ROOM: dict[str, Any] = {
    "max_num_batched_tokens": 16,
    "max_num_seqs": 6,
    "block_size": 4,
    "num_gpu_blocks_override": 32,
    "max_model_len": 128,
}
"""Chunks of at most 16 tokens, and so few blocks that sequences are preempted."""
CHOSEN = (2, 3, 6, 9)
"""Prompts of the first wave that the second one takes up."""


@dataclass(frozen=True)
class Wave:
    """Prompts, and what `transformers` says after each."""

    prompts: list[list[int]]
    wanted: list[list[int]]


class Waves:
    """Both waves for one model."""

    def __init__(self, model: Path) -> None:
        self.model, self.reference = model, Reference(model)
        self.first = self._wave(mixed_prompts())
        taken = [(self.first.prompts[i], self.first.wanted[i]) for i in CHOSEN]
        self.second = self._wave([each for prompt, said in taken for each in (prompt, [*prompt, *said, 5, 6, 7])])

    def _wave(self, prompts: list[list[int]]) -> Wave:
        return Wave(prompts, [self.reference.greedy(prompt, COUNT) for prompt in prompts])

    def check(self, speculative: dict[str, Any] | None = None, **room: Any) -> "Ran":
        """Run both on a new engine; compare the tokens."""
        options = {**ROOM, **room, "speculative_config": always(speculative)}
        with LLM(
            model=str(self.model), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, **options
        ) as llm:
            runs = [collect(llm, wave.prompts, PARAMS) for wave in (self.first, self.second)]
            stats = llm.stats()
        for wave, run in zip((self.first, self.second), runs, strict=True):
            assert_identical(wave.prompts, run.outputs, wave.wanted, self.reference)
        return Ran(stats.prefix_hits, stats.preemptions, stats.proposed, stats.accepted)


@dataclass(frozen=True)
class Ran:
    """Counts of both waves."""

    hits: int
    preemptions: int
    proposed: int
    accepted: int


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.full) for family in HYBRIDS]
)
def test_prefix_hits_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    waves = Waves(build(family, tmp_path / "target"))
    off = waves.check()
    assert off.hits > 0
    assert off.preemptions > 0
    on = waves.check(NGRAM)
    assert on.hits > 0
    assert on.proposed > 0


@pytest.mark.full
@pytest.mark.parametrize("family", HYBRIDS)
def test_chains_of_every_length(family: str, tmp_path: Path) -> None:
    """Of n-grams and of a draft model, which is a copy with noise, so it has recurrent layers, too."""
    waves = Waves(build(family, tmp_path / "target"))
    draft = perturbed(waves.model, tmp_path / "draft")
    assert waves.check(enable_prefix_caching=False).hits == 0
    preemptions = 0
    for k in range(1, 9):
        for speculative in (NGRAM, {"method": "draft_model", "model": str(draft)}):
            on = waves.check({**speculative, "num_speculative_tokens": k})
            assert on.hits > 0
            assert on.proposed > on.accepted > 0 or speculative is NGRAM
            preemptions += on.preemptions
    assert preemptions > 0


def cached(llm: LLM, prompts: Seq[Seq[int]]) -> list[int]:
    """Return how many tokens of each prompt were cached, one request after another."""
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [llm.generate([one], PARAMS, use_tqdm=False)[0].num_cached_tokens for one in given]


def test_where_prompts_continue_others_and_where_they_part(tmp_path: Path) -> None:
    model = build("lfm2", tmp_path)
    prompt = list(range(3, 60))
    said = Reference(model).greedy(prompt, COUNT)
    with LLM(
        model=str(model), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, block_size=4, max_num_seqs=2
    ) as llm:
        assert cached(llm, [prompt, prompt]) == [0, 56]
        assert cached(llm, [[*prompt, *said, 7, 8]]) == [68]
        assert cached(llm, [[*prompt[:30], 9, 9, 9], [*prompt[:30], 8, 8, 8]]) == [0, 28]


def test_mtp_layers_begin_after_a_prefix(tmp_path: Path) -> None:
    """The draft's own KV depends on the token after, so a hit ends a block earlier."""
    target = with_mtp("qwen3_next", tmp_path / "target")
    waves = Waves(target)
    on = waves.check({"method": "mtp", "num_speculative_tokens": 3, "draft_shape": "chain"})
    assert on.hits > 0
    assert on.proposed > 0


def test_few_states_are_enough(tmp_path: Path) -> None:
    """With one sequence at a time there are two, so that most are given up before they could be used."""
    waves = Waves(build("lfm2", tmp_path))
    assert waves.check(NGRAM, max_num_seqs=1).hits > 0
