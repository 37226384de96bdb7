"""Requests that carry the answer which the log has for them, and end where it ends."""

from cluster.simulate.odds import Odds
from protos.messages import Request, Sampling
from runtime.text.detokenizer import Detokenizer


class RecordedSampling(Sampling, frozen=True, gc=False):
    """Sampling options, with the answer that is sampled by them, and the odds of its drafts if they are computed."""

    output_token_ids: tuple[int, ...] = ()
    odds: Odds | None = None


def output_of(sampling: Sampling) -> tuple[int, ...]:
    """Return the logged answer of a request."""
    assert isinstance(sampling, RecordedSampling), "made by `cluster.simulate.replay`"
    return sampling.output_token_ids


def odds_of(request: Request) -> Odds | None:
    """Return the odds of a request's drafts, if they are computed."""
    assert isinstance(request.sampling, RecordedSampling), "made by `cluster.simulate.replay`"
    return request.sampling.odds


class EndOfLog(Detokenizer):
    """Ends a sequence after its logged tokens, in the place where stop strings are found. Makes no text."""

    __slots__ = ("_left",)

    def __init__(self, num_tokens: int) -> None:
        self._left = num_tokens

    def push(self, token_id: int) -> str | None:
        """Count a token; return a reason to stop after the last."""
        self._left -= 1
        return None if self._left else "end of the log"

    def take(self) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


def end_of_log(request: Request) -> Detokenizer:
    """Return what ends *request* where its logged answer ends."""
    return EndOfLog(len(output_of(request.sampling)))
