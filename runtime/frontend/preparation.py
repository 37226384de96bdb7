"""Where requests are prepared: on the event loop, or in threads if that could take long."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from protos.messages import Request
from protos.sampling import SamplingParams
from runtime.frontend.client import Prompt
from runtime.frontend.fair_turns import FairTurns
from runtime.frontend.keys import TENANT
from runtime.text.tokenizer_pool import TokenizerPool

if TYPE_CHECKING:
    from runtime.text.preprocessor import Preprocessor

LONG_PROMPT = 20_000
"""Longer prompts, in characters or token ids, are prepared in a thread, so that they do not block the event loop."""

LONGEST_TRIAL_S = 90.0
"""Far above the limits on checking a grammar, with the start of the first process that does."""

Result = TypeVar("Result")


class Preparation:
    """Prepares requests. New grammars are tried in threads of their own, and take turns by key."""

    def __init__(self) -> None:
        self._tokenizers, self._triers = TokenizerPool(), TokenizerPool(LONGEST_TRIAL_S)
        self._trials = FairTurns("grammars")

    async def requests(
        self, preprocessor: "Preprocessor", prompt: Prompt, params: SamplingParams, request_id: str
    ) -> list[Request]:
        """Return `Preprocessor.requests`.

        Raises:
            InvalidRequestError: the prompt, the parameters or the grammar are invalid.
            OverloadedError: too many prompts, or grammars of this key, are being prepared.
        """
        make, structured = preprocessor.requests, params.structured_outputs
        if structured is not None and not preprocessor.grammars.knows(structured):
            async with self._trials.turn(TENANT.get()):
                return await self._triers.run(make, prompt, params, request_id)
        if any(map(_is_long, (prompt, params.prediction, params.allowed_token_ids))):
            return await self._tokenizers.run(make, prompt, params, request_id)
        return make(prompt, params, request_id)

    async def in_thread(self, work: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Run *work*, which tokenises, in a thread. Raises `OverloadedError` if too much waits."""
        return await self._tokenizers.run(work, *args, **options)


def _is_long(given: object) -> bool:
    """Whether text or ids are long enough to be tokenised and checked in a thread."""
    return isinstance(given, str | list | tuple) and len(given) > LONG_PROMPT
