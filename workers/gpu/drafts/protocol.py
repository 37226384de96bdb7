"""What the programs that draft call: a draft that a graph can run."""

from typing import Protocol

import torch

from workers.gpu.inputs import RoundInputs
from workers.gpu.metadata import DeviceMetadata

Prediction = tuple[torch.Tensor, torch.Tensor | None]


class GraphedModel(Protocol):
    """A draft that a graph can run.

    Attributes:
        shift: 1 if a cache entry holds the token after its position, 0 if it holds its own.
    """

    shift: int

    def known_features(self, inputs: RoundInputs) -> torch.Tensor | None:
        """Return what is fed with the last C known tokens of each row, `[R * C, X]`; None if tokens alone are fed."""
        ...

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        wanted_N: torch.Tensor,
        rows: DeviceMetadata,
        features_TX: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the draft over T tokens of *rows*, writing K and V; return the output at those *wanted*, `[N, X]`.

        `features_TX` are fed with the tokens; a draft that takes none is given None.
        """
        ...

    def predict(self, output_NX: torch.Tensor, step: int) -> Prediction:
        """Read the output after *step* draft tokens.

        Returns:
            fp32 logits over the target's vocabulary, `[N, V]`, and the features to feed with the next token, `[N, Y]`;
            None if it takes none.
        """
        ...
