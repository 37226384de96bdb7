"""Drafts as graphs call them: on tensors of the device, with an attention that is planned there."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from proposers.shared.heads import Heads
from workers.attention.backend import run_with
from workers.gpu.attention_torch import DeviceAttention
from workers.gpu.drafts.features import FeatureArea
from workers.gpu.drafts.protocol import Prediction
from workers.gpu.inputs import RoundInputs
from workers.gpu.metadata import DeviceMetadata
from workers.sampling.sampler import fit_vocab

if TYPE_CHECKING:
    from workers.model.module_runner import ModuleRunner
    from workers.model.runner import ModelRunner


class LanguageModel:
    """A draft model. See `GraphedModel`; its outputs are logits.

    Args:
        runner: of the model.
        attention: over its KV cache.
        vocab_size: of the target.
    """

    def __init__(self, runner: "ModelRunner", attention: DeviceAttention, vocab_size: int) -> None:
        self._runner, self._attention, self._vocab_size = runner, attention, vocab_size
        self.shift = 0

    def known_features(self, inputs: RoundInputs) -> torch.Tensor | None:
        """See `GraphedModel`."""
        return None

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        wanted_N: torch.Tensor,
        rows: DeviceMetadata,
        features_TX: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `GraphedModel`."""
        self._attention.use(rows)
        tokens_1T = tokens_T.clamp_max(self._runner.loaded.vocab_size - 1)[None]
        return self._runner.call(tokens_1T, positions_T[None], wanted_N, self._attention)[0]

    def predict(self, output_NX: torch.Tensor, step: int) -> Prediction:
        """See `GraphedModel`."""
        return fit_vocab(output_NX, self._vocab_size), None


class HeadModel:
    """The module of EAGLE, EAGLE-3 or MTP. See `GraphedModel`; its outputs are states.

    Args:
        runner: of the module.
        attention: over its KV cache.
        area: has the target's features.
        vocab_size: of the target.
    """

    def __init__(self, runner: "ModuleRunner", attention: DeviceAttention, area: FeatureArea, vocab_size: int) -> None:
        self._module, self._attention, self._area = runner.loaded.module, attention, area
        self._vocab_size, self._own_size = vocab_size, runner.loaded.vocab_size
        self.shift = int(self._module.shift)

    def known_features(self, inputs: RoundInputs) -> torch.Tensor | None:
        """See `GraphedModel`."""
        return self._area.known(inputs)

    def forward(
        self,
        tokens_T: torch.Tensor,
        positions_T: torch.Tensor,
        wanted_N: torch.Tensor,
        rows: DeviceMetadata,
        features_TX: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `GraphedModel`."""
        self._attention.use(rows)
        tokens_1T, positions_1T = tokens_T.clamp_max(self._own_size - 1)[None], positions_T[None]
        features_1TX = None if features_TX is None else features_TX[None]
        output_1TX: torch.Tensor = run_with(
            self._attention, lambda: self._module(tokens_1T, positions_1T, features_1TX)
        )
        return output_1TX[0].index_select(0, wanted_N)

    def predict(self, output_NX: torch.Tensor, step: int) -> Prediction:
        """See `GraphedModel`."""
        logits_NV, features_NX = self._module.predict(output_NX, step)
        return fit_vocab(logits_NV, self._vocab_size), features_NX


@dataclass(frozen=True)
class GraphedHeads:
    """Heads as graphs call them.

    Attributes:
        module: the heads.
        begin: returns the initial states of each row of a round, `[R, S]`.
        vocab_size: of the target.
    """

    module: Heads
    begin: Callable[[], torch.Tensor]
    vocab_size: int

    def predict(self, states_NS: torch.Tensor, tokens_N: torch.Tensor, head: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states that *head* reads, and its fp32 logits over the target's vocabulary, `[N, V]`.

        Args:
            states_NS: those that the head before it read, or the initial ones.
            tokens_N: what follows them.
            head: index.
        """
        states_NS = self.module.step(states_NS, tokens_N.clamp_max(self.module.vocab_size - 1), head)
        return states_NS, fit_vocab(self.module.logits(states_NS, head), self.vocab_size)
