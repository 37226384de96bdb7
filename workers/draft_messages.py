"""Messages from the draft to target rank 0, over a draft channel."""

import msgspec

from protos.worker_messages import Drafted


class DraftJoined(msgspec.Struct, frozen=True, tag=True):
    """The draft is connected: the first message of a draft channel."""


class DraftTable(msgspec.Struct, frozen=True, tag=True):
    """The draft tokens of a round: int32 `[rows, width]`, row after row, little-endian; see `workers.draft.wire`."""

    drafted: Drafted
    rows: int
    width: int
    ids: bytes


class FeaturesReceived(msgspec.Struct, frozen=True, tag=True):
    """The draft received the features of *count* rounds."""

    count: int


ToTargetRank0 = DraftJoined | DraftTable | FeaturesReceived
