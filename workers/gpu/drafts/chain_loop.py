"""The whole chain of a draft as a program: K forwards, and the sampling between them, on static buffers.

The draft shares the target's block tables, noise and sampling parameters, and its tokens go where the target reads
them.
"""

from typing import Protocol

from workers.gpu.choosing import choose
from workers.gpu.drafts.draft_steps import DraftSteps
from workers.gpu.drafts.protocol import GraphedModel
from workers.gpu.inputs import RoundInputs
from workers.gpu.sizes import SamplerKind


class DraftProgram(Protocol):
    """Drafts for rounds of one size: writes tokens, and for trees their shape, where the target reads them."""

    def run(self, kind: SamplerKind) -> None:
        """Run the program."""
        ...


class ChainLoop:
    """Drafts chains for rounds of one size, as long as the size has room for. See `DraftProgram`.

    Args:
        model: the draft.
        inputs: of the size; the draft tokens are written into its `tokens_RQ`.
        most: the longest chain that the draft can make.
    """

    def __init__(self, model: GraphedModel, inputs: RoundInputs, most: int) -> None:
        self._num_steps = min(most, inputs.size.queries - 1)
        self._model, self._inputs, self._steps = model, inputs, DraftSteps(model, inputs)

    def run(self, kind: SamplerKind) -> None:
        """Run the loop."""
        found, limits = self._inputs.on_device, self._inputs.limits(1)
        output_RX = self._steps.catch_up()
        for step in range(self._num_steps):
            logits_RV, features_RX = self._model.predict(output_RX, step)
            self._inputs.penalise_(logits_RV, step, 1)
            ids_R = choose(kind, logits_RV, found["keys_RQ"][:, step], limits)
            found["tokens_RQ"][:, step + 1].copy_(ids_R.clamp_min(0))
            if step + 1 < self._num_steps:
                output_RX = self._steps.extend(step + 1, features_RX)
