"""The other side of each comparison: `transformers`, with the same weights, prompts and numbers of tokens."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager

from benchmarks.shared.workload import Item, SamplingSettings

Dtype = torch.dtype | Literal["auto"]
GREEDY = SamplingSettings(0.0)
PAD = 0
NO_EOS = -1  # continuous batching reads None as "the model's own"
PAGE = 256


def _load(folder: Path, dtype: Dtype = "auto") -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model.generation_config = GenerationConfig(pad_token_id=PAD)  # without the checkpoint's: no end of text
    return model


def _config(sampling: SamplingSettings, max_tokens: int, eos: int | None = None) -> GenerationConfig:
    if sampling.temperature == 0:
        return GenerationConfig(do_sample=False, max_new_tokens=max_tokens, eos_token_id=eos, pad_token_id=PAD)
    return GenerationConfig(
        do_sample=True,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=0,
        max_new_tokens=max_tokens,
        eos_token_id=eos,
        pad_token_id=PAD,
    )


class Generate:
    """`generate`; every call generates exactly the requested number of tokens."""

    def __init__(self, folder: Path, dtype: Dtype = "auto") -> None:
        self.model = _load(folder, dtype)

    def one(self, item: Item, sampling: SamplingSettings) -> int:
        """Decode at batch 1; return the number of tokens."""
        return self._run([item], _config(sampling, item.max_tokens))

    def padded(self, items: Sequence[Item]) -> int:
        """Run a left-padded batch until its longest request is done; return the number of requested tokens."""
        longest = max(item.max_tokens for item in items)
        self._run(items, _config(GREEDY, longest))
        return sum(item.max_tokens for item in items)

    def _run(self, items: Sequence[Item], config: GenerationConfig, assistant: PreTrainedModel | None = None) -> int:
        width = max(len(item.prompt) for item in items)
        ids_BL = torch.tensor([[PAD] * (width - len(item.prompt)) + list(item.prompt) for item in items])
        mask_BL = torch.tensor([[0] * (width - len(item.prompt)) + [1] * len(item.prompt) for item in items])
        out_BL = self.model.generate(
            ids_BL, attention_mask=mask_BL, generation_config=config, assistant_model=assistant
        )
        return (int(out_BL.shape[1]) - width) * len(items)


class Assisted(Generate):
    """`generate(assistant_model=...)`.

    Args:
        num_tokens: draft tokens per round; None: the library's defaults (at most 20, fewer if the assistant's
            confidence is low).
    """

    def __init__(self, folder: Path, draft: Path, num_tokens: int | None) -> None:
        super().__init__(folder)
        self.assistant = _load(draft)
        if num_tokens is not None:
            self.assistant.generation_config.num_assistant_tokens = num_tokens
            self.assistant.generation_config.num_assistant_tokens_schedule = "constant"
            self.assistant.generation_config.assistant_confidence_threshold = 0.0

    def one(self, item: Item, sampling: SamplingSettings) -> int:
        return self._run([item], _config(sampling, item.max_tokens), self.assistant)


class GenerateBatch:
    """Continuous batching with the manager that `generate_batch` uses, but with a length for each request.

    `generate_batch` itself takes one length for all requests, and makes a manager in every call. Here the manager is
    sized for the workload, and made outside the timed block. Prefixes are not reused between calls.

    The manager exists only while this side runs. Its thread has an OpenMP thread pool of its own. If there are more
    OpenMP threads than processors, OpenMP hardly spins, and the other sides would lose a third of their speed.
    """

    _manager: ContinuousBatchingManager

    def __init__(self, folder: Path, items: Sequence[Item], dtype: Dtype = "auto") -> None:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # warns about psutil at each start
        self.model = _load(folder, dtype)
        pages = sum(-(-(len(item.prompt) + item.max_tokens) // PAGE) for item in items)
        self.batching = ContinuousBatchingConfig(num_blocks=pages + len(items), allow_block_sharing=False)
        self.config = _config(GREEDY, max(item.max_tokens for item in items), NO_EOS)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the manager until the block ends."""
        with (
            torch.no_grad(),
            self.model.continuous_batching_context_manager(
                generation_config=self.config,
                continuous_batching_config=self.batching,
                timeout=5,
            ) as self._manager,
        ):
            yield

    def all(self, items: Sequence[Item]) -> int:
        """Run all requests at once; return the number of tokens.

        Raises:
            RuntimeError: continuous batching failed; with the library's message.
        """
        for item in items:
            self._manager.add_request(list(item.prompt), max_new_tokens=item.max_tokens)
        return sum(_next_length(self._manager) for _ in items)


def _next_length(manager: ContinuousBatchingManager) -> int:
    while True:
        result = manager.get_result(timeout=1)
        if result is not None and result.error is not None:
            raise RuntimeError(f"continuous batching failed: {result.error}")
        if result is not None and result.is_finished():
            return len(result.generated_tokens)
        if result is None and not manager.is_running():
            raise RuntimeError("continuous batching failed: its generation thread ended")
