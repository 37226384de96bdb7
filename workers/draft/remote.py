"""Drafts from a worker of its own, as target rank 0 receives them."""

import logging
from collections.abc import Sequence as Seq

import torch

from protos.draft import NO_DRAFT
from protos.messages import RoundPlan, Row, Verdict
from protos.worker_messages import FormDraftChannel
from workers.distributed.groups import first_line
from workers.draft.channel import DraftChannels
from workers.draft.feature_channel import FeatureSender
from workers.draft.receiver import DraftReceiver
from workers.draft.wire import decode, decode_probs
from workers.target import TargetWorker
from workers.verification.draft_probs import DRAFT_PROBS_SIZE, NO_DRAFT_PROBS, ProposedDrafts

logger = logging.getLogger(__name__)


class RemoteDraft:
    """A `DraftSource` of target rank 0: the draft is in another process and may be late, dead or absent.

    Args:
        channels: this end of the channel between target rank 0 and the draft.
        target: whose slots and vocabulary drafts are checked against.
        has_probs: whether the draft sends the distributions that it sampled its tokens from.
    """

    def __init__(
        self, channels: DraftChannels[DraftReceiver], target: TargetWorker, *, has_probs: bool = False
    ) -> None:
        self._channels, self._target, self._has_probs = channels, target, has_probs

    def propose(self, plan: RoundPlan, rows: Seq[Row]) -> ProposedDrafts:
        """Return the drafts that arrive before the deadline; none for rows whose draft extends another text."""
        end = self._channels.end(plan.epoch)
        if end is None:
            return ProposedDrafts([NO_DRAFT] * len(rows))
        arrival = end.collect(plan.round, max(row.k for row in rows))
        if arrival.table is None:
            return ProposedDrafts([NO_DRAFT] * len(rows), missed=arrival.missed)
        size = DRAFT_PROBS_SIZE if self._has_probs else 0
        drafts = decode(self._target.slots, rows, arrival.table, self._target.sampler.vocab_size, size)
        return ProposedDrafts(drafts, decode_probs(rows, drafts, arrival.table) if self._has_probs else NO_DRAFT_PROBS)

    def feed_back(self, plan: RoundPlan, target: TargetWorker, verdicts: Seq[Verdict], seconds: float) -> None:
        """Send the features of kept tokens, and adjust the deadline to *seconds*, the duration of scoring."""
        end = self._channels.end(plan.epoch)
        if end is None:
            return
        end.scored(seconds)
        if end.features is not None:
            self._send_features(end.features, plan, target, verdicts)

    @staticmethod
    def _send_features(features: FeatureSender, plan: RoundPlan, target: TargetWorker, verdicts: Seq[Verdict]) -> None:
        try:
            features.post(plan.round, target.kept_features(plan.rows, verdicts))
        except torch.OutOfMemoryError as error:
            logger.warning("the features of round %d are dropped: %s", plan.round, first_line(error))
            features.post_none(plan.round)

    def skip(self, plan: RoundPlan) -> None:
        """Tell a draft that is fed features that those of this round will not come."""
        end = self._channels.end(plan.epoch)
        if end is not None and end.features is not None:
            end.features.post_none(plan.round)

    def form(self, order: FormDraftChannel) -> None:
        """Begin to form another channel."""
        self._channels.form(order)

    def close(self) -> None:
        """Leave the channel."""
        self._channels.close()
