"""The `token_origins` of a response: whether each token was drafted and accepted, or sampled by the target."""

from collections.abc import Iterator

from protos.messages import Step, TokenOutput
from runtime.http.render import TokenTexts
from runtime.http.responses import Origin, StepOrigins, TokenOrigin


class OriginRecorder:
    """Records the origins of the tokens of one response."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._num_steps: dict[int, int] = {}
        self._pending: list[StepOrigins] = []

    def add(self, index: int, output: TokenOutput) -> None:
        """Record the step that added *output* to the choice *index*."""
        step = output.step
        if step is None or not output.token_ids:
            return
        number = self._num_steps[index] = self._num_steps.get(index, 0) + 1
        tokens = [
            TokenOrigin(self._texts[token_id], origin)
            for token_id, origin in zip(output.token_ids, _origins(step, len(output.token_ids)), strict=True)
        ]
        self._pending.append(StepOrigins(index, number, step.proposed, step.depth, step.accepted, tokens))

    def take(self) -> list[StepOrigins]:
        """Return what was added since the last call."""
        pending, self._pending = self._pending, []
        return pending


def _origins(step: Step, num_tokens: int) -> Iterator[Origin]:
    """Yield the origin of each token of a step: the accepted ones, then the target's own unless the answer ended."""
    for position in range(num_tokens):
        if position < step.accepted:
            yield "accepted"
        elif not step.proposed:
            yield "plain"
        else:
            yield "bonus" if step.accepted == step.depth else "correction"
