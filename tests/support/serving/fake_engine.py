"""A whole engine with a fake executor: controller, scheduler, tokenizer and preprocessor are real.

`main` serves it as the child of a `ProcessChannel`.
"""

import json
import os
import re
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from msgspec import structs
from tokenizers import AddedToken, Tokenizer

from protos.config.engine import CacheConfig, SchedulerConfig, SpeculativeConfig
from protos.errors import ModelError
from protos.interfaces import Inbox
from protos.messages import RoundPlan, Row, TokenLogprobs, Verdict, WorkerInfo
from protos.progress import ProgressCallback
from runtime.core.controller import Controller
from runtime.core.scheduler import Scheduler
from runtime.frontend.async_engine import AsyncEngine
from runtime.frontend.controller_process import serve_child
from runtime.metrics.prometheus import Metrics
from runtime.policy.base import NoSpeculation
from runtime.policy.batch_size import BatchSizePolicy
from runtime.text.detokenizer import DetokenizerFactory
from runtime.text.preprocessor import Preprocessor
from tests.support.in_one_process import InOneProcess
from tests.support.serving.thread_channel import ThreadChannel
from tests.support.text.byte_level import train_byte_level

EOS = 0
TEMPLATE = (
    "{% if tools %}[tools] {{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}"
    "{% for call in m.tool_calls or [] %}[call] {{ call.function.arguments | tojson }}{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}[bot]{% endif %}"
)
STEP_S = 0.0005
"""Seconds that a step sleeps. Real steps release the interpreter; without that the frontend's thread would starve."""

POISON = "crash now"
FAILURES = {"no way on": "structured_outputs: no token is left to choose", "not a number": "the logits are NaN"}
"""Prompts with these words fail their own request."""
SENTENCES = ["the quick brown fox jumps over the lazy dog", "naïve café, déjà vu", "def f(x): return x + 1"]


@cache
def bare_tokenizer() -> Tokenizer:
    """Return a byte-level BPE tokenizer; `transformers` is not needed for it."""
    return train_byte_level(SENTENCES, 300, [AddedToken("<eos>", special=True)])


@cache
def tokenizer() -> Any:
    """Return the same tokenizer as frontends load it, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=bare_tokenizer(), eos_token="<eos>", chat_template=TEMPLATE)


@cache
def letters() -> list[int]:
    """Return the ids that the fake model generates: lower-case letters and the space."""
    return [bare_tokenizer().token_to_id(char) for char in "abcdefghijklmnopqrstuvwxyzĠ"]


def ids(text: str) -> list[int]:
    """Return the token ids of *text*."""
    return list(tokenizer().encode(text))


def ranked(history: Sequence[int]) -> list[int]:
    """Return the fake model's tokens after *history*, most likely first."""
    said = letters()
    first = zlib.crc32(repr(list(history[-4:])).encode()) % len(said)
    return said[first:] + said[:first]


def expected(prompt: str, count: int) -> str:
    """Return the text of *count* tokens after *prompt*."""
    ids = bare_tokenizer().encode(prompt).ids
    for _ in range(count):
        ids.append(ranked(ids)[0])
    return str(bare_tokenizer().decode(ids[-count:]))


@dataclass
class HashExecutor(InOneProcess):
    """Samples `ranked(history)[0]`; accepts half of the draft tokens."""

    info: WorkerInfo
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    prompt_len: dict[int, int] = field(default_factory=dict)

    def start(self) -> WorkerInfo:
        return self.info

    def shutdown(self) -> None:
        pass

    def run(self, plan: RoundPlan) -> list[Verdict]:
        time.sleep(STEP_S)
        for new in plan.new:
            self.token_ids[new.slot] = list(new.token_ids)
            self.prompt_len[new.slot] = new.prompt_len
            text = bare_tokenizer().decode(list(new.token_ids))
            if POISON in text:
                os._exit(9)
            if "raise" in text:
                raise RuntimeError("no such luck at /secret/path")
        return [self._verdict(row) for row in plan.rows]

    def _verdict(self, row: Row) -> Verdict:
        known = self.token_ids[row.slot]
        text = bare_tokenizer().decode(known[: self.prompt_len[row.slot]])
        for words, reason in FAILURES.items():
            if words in text:
                return Verdict(row.slot, failed=reason)
        known[row.known_len - len(row.new_token_ids) :] = row.new_token_ids
        del known[row.known_len :]
        end = min(row.start + row.length, self.prompt_len[row.slot] - 1)
        prompt = [self._logprobs(known[:i], known[i]) for i in range(row.start + 1, end + 1)]
        if not row.samples:
            return Verdict(row.slot, prompt_logprobs=prompt)
        said: list[int] = []
        num_drafted = min(row.k, row.depth)  # a chain
        for _ in range(1 + num_drafted // 2):
            said.append(self._next(row.slot, known + said))
        logprobs = [self._logprobs(known + said[:i], token) for i, token in enumerate(said)]
        return Verdict(row.slot, said, num_drafted, range(len(said) - 1), logprobs, prompt)

    def _next(self, slot: int, history: Sequence[int]) -> int:
        return ranked(history)[0]

    def _logprobs(self, history: Sequence[int], chosen: int) -> TokenLogprobs:
        best = ranked(history)
        rank = best.index(chosen) + 1 if chosen in best else len(best) + 1
        top = best[:5]
        chosen_logprob = -0.5 * rank if rank <= len(best) else float("-inf")
        return TokenLogprobs([chosen, *top], [chosen_logprob, *(-0.5 * i for i in range(1, 6))], [rank, *range(1, 6)])


class Scripted(HashExecutor):
    """Generates the text between the prompt's last `say: ` and `<end>`, then EOS; else like `HashExecutor`."""

    def _next(self, slot: int, history: Sequence[int]) -> int:
        asked, said = history[: self.prompt_len[slot]], history[self.prompt_len[slot] :]
        scripts = re.findall(r"say: ((?:(?!say: ).)*)<end>", str(bare_tokenizer().decode(list(asked))), re.DOTALL)
        if not scripts:
            return super()._next(slot, history)
        wanted = [*bare_tokenizer().encode(scripts[-1]).ids, EOS]
        return wanted[min(len(said), len(wanted) - 1)]


def build(
    inbox: Inbox,
    say: ProgressCallback,
    max_model_len: int = 512,
    speculative: SpeculativeConfig | None = None,
    kind: type[HashExecutor] = HashExecutor,
) -> Controller:
    """Return the controller of an engine of 4 slots."""
    say("loading nothing")
    info = WorkerInfo(4 * max_model_len // 16, 16, max_model_len, bare_tokenizer().get_vocab_size(), (EOS,))
    if speculative is not None:
        info = structs.replace(
            info, methods=speculative.methods, num_speculative_tokens=speculative.num_speculative_tokens
        )
    executor = kind(info)
    detokenizers = DetokenizerFactory(bare_tokenizer())
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64), CacheConfig(), info, detokenizers=detokenizers
    )
    return Controller(
        scheduler, NoSpeculation() if speculative is None else BatchSizePolicy(speculative), executor, inbox
    )


async def make_preprocessor(info: WorkerInfo) -> Preprocessor:
    """Return the preprocessor of the fake model."""
    capacity = info.num_blocks * info.block_size
    return Preprocessor(
        tokenizer(),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        capacity=capacity,
        eos_ids=info.eos_ids,
    )


def local_engine(
    max_model_len: int = 512, speculative: SpeculativeConfig | None = None, kind: type[HashExecutor] = HashExecutor
) -> AsyncEngine:
    """Return an engine whose controller runs in a thread."""
    channel = ThreadChannel(lambda inbox, say: build(inbox, say, max_model_len, speculative, kind))
    metrics = Metrics("fake")
    engine = AsyncEngine(channel, make_preprocessor, metrics)
    metrics.use_stats(engine.stats)
    return engine


def build_child(config: str, inbox: Inbox, say: ProgressCallback) -> Controller:
    """Build a fake engine from *config*, an `EngineConfig` as JSON; only the model's name and length are used."""
    model = json.loads(config)["model"]
    if model["model"] == "refuse":
        raise ModelError("there is no such model")
    if model["model"] == "hang":
        say("hanging")
        threading.Event().wait()
    return build(inbox, say, max_model_len=model["max_model_len"])


def main() -> None:
    """Run as a child process."""
    serve_child(build_child)
