"""The target's step as a program: forward, sampling and acceptance on static buffers."""

import torch

from workers.gpu.attention_torch import DeviceAttention
from workers.gpu.choosing import accepted, choose
from workers.gpu.drafts.features import FeatureArea
from workers.gpu.inputs import RoundInputs
from workers.gpu.sizes import LINE, SamplerKind
from workers.gpu.staging import ResultArea
from workers.model.runner import ModelRunner


class TargetStep:
    """Rounds of one size.

    Args:
        runner: of the target.
        attention: over its KV cache.
        inputs: of the size.
        results: where the result is written: for each row the sampled ids, a bit for each node of the draft that is
            accepted, the draft tokens, their number, and the columns of their parents, int64 `[R, 3 * Q]`.
        vocab_size: ids that may be sampled.
        area: where the features of accepted tokens are written for a draft that graphs run; None if there is none.

    A rank that gets no logits runs the forward alone.

    Attributes:
        states_of: the features that each program writes, for drafts that read them; none where *area* has them.
    """

    def __init__(
        self,
        runner: ModelRunner,
        attention: DeviceAttention,
        inputs: RoundInputs,
        results: ResultArea,
        vocab_size: int,
        *,
        area: FeatureArea | None = None,
    ) -> None:
        self._area = area
        self._runner, self._attention, self._inputs, self._vocab_size = runner, attention, inputs, vocab_size
        rows, queries = inputs.size
        self._result_RX = results.on_device[: LINE * rows * queries].view(rows, LINE * queries)
        self._all_T = torch.arange(rows * queries, device=results.on_device.device)
        self.states_of: dict[SamplerKind, torch.Tensor | None] = {}

    def run(self, kind: SamplerKind) -> None:
        """Run the step."""
        found, queries = self._inputs.on_device, self._inputs.size.queries
        if queries == 1:
            self._inputs.follow_()
            self._runner.loaded.group.broadcast(found["tokens_RQ"].view(-1))  # rank 0 alone knows what was chosen
        tokens_RQ, limits = found["tokens_RQ"], self._inputs.limits(queries)
        self._attention.use(self._inputs.metadata)
        tokens_1T, positions_1T = tokens_RQ.view(1, -1), found["positions_RQ"].view(1, -1)
        logits_TV, states_TF = self._runner.call(tokens_1T, positions_1T, self._all_T, self._attention)
        if self._runner.loaded.group.rank:
            return
        logits_TV = logits_TV[:, : self._vocab_size]
        self._inputs.penalise_(logits_TV, 0, queries)
        ids_T = choose(kind, logits_TV, found["keys_RQ"].view(-1), limits)
        ids_RQ = ids_T.view_as(tokens_RQ)
        nodes_R = accepted(ids_RQ, tokens_RQ, found["parents_RQ"], found["drafted_R"])
        if self._area is None or states_TF is None:
            self.states_of[kind] = states_TF
        else:
            self._area.write_accepted(self._inputs, states_TF, nodes_R)
        self._result_RX[:, :queries].copy_(ids_RQ)
        self._result_RX[:, queries].copy_(nodes_R)
        write_drafts(self._inputs, self._result_RX[:, queries + 1 :])


def write_drafts(inputs: RoundInputs, into_RX: torch.Tensor) -> None:
    """Write the drafts that are on the device: tokens, their number, and their parents' columns, `[R, 2 * Q - 1]`."""
    found, drafted = inputs.on_device, inputs.size.queries - 1
    into_RX[:, :drafted].copy_(found["tokens_RQ"][:, 1:])
    into_RX[:, drafted].copy_(found["drafted_R"])
    into_RX[:, drafted + 1 :].copy_(found["parents_RQ"][:, 1:])
