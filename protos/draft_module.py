"""What a learned proposer is made of, and what it may ask of the worker it lives on. DESIGN sections 2 and 4.

A learned proposer comes in two parts. Its *module* is a torch module that `build` makes from a checkpoint: weights, the
published mathematics, and the K/V shapes of its attention layers if it has any. The *proposer* asks the worker to run
the module over paged KV, chooses tokens by the target's own sampling, and strings them into drafts. Neither imports
`workers`: attention inside a module goes through the function that `transformers` finds under `DraftWeights.attention`.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.errors import ConfigError
from protos.layers import FeatureSpec, LayerShape

if TYPE_CHECKING:
    import torch


class DraftWeights(Protocol):
    """What a module is built from: the draft's checkpoint, and what it borrows of the target."""

    @property
    def folder(self) -> Path | None:
        """Where the draft's checkpoint lies; None where it is part of the target's."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The draft's `config.json`; the target's where the draft is part of it."""
        ...

    @property
    def target_config(self) -> Mapping[str, Any]:
        """The target's `config.json`."""
        ...

    @property
    def attention(self) -> str:
        """The `attn_implementation` that reads and writes paged KV."""
        ...

    @property
    def dtype(self) -> "torch.dtype":
        """What to compute in."""
        ...

    @property
    def device(self) -> "torch.device":
        """Where to compute."""
        ...

    def tensors(self, prefix: str = "") -> "dict[str, torch.Tensor]":
        """Read the draft's tensors, safely, those of the target's checkpoint where the draft is part of it.

        *prefix* picks some, and is cut off their names. Dtype as stored, on the CPU.
        """
        ...

    def embedding(self) -> "torch.nn.Module":
        """Return the target's input embedding, ids `[...]` -> `[..., Ht]`, in `dtype` on `device`."""
        ...

    def head(self) -> "Callable[[torch.Tensor], torch.Tensor]":
        """Return the target's head, states `[..., Ht]` -> logits `[..., V]`, with the caps and scales of its family."""
        ...


class Module(Protocol):
    """What the worker runs. A `torch.nn.Module` in eval mode, without gradients.

    Attributes:
        layers: K and V of each attention layer, in the order of their `layer_idx`; empty where there is none.
        shift: 1 where the cache entry of position i is made of token i + 1 and the target's features of position i (the
            EAGLE family and MTP), 0 where it is made of token i alone.
        max_model_len: the longest text it can go on from.
        vocab_size: ids above are replaced before they are fed (shift 0) or never proposed.
    """

    layers: tuple[LayerShape, ...]
    shift: int
    max_model_len: int
    vocab_size: int

    def take_in(self, features_TF: "torch.Tensor") -> "torch.Tensor":
        """Return what is kept of the target's features until they are fed, `[T, F] -> [T, X]`: `fc` of EAGLE-3, say."""
        ...

    def __call__(
        self, tokens_1T: "torch.Tensor", positions_1T: "torch.Tensor", features_1TF: "torch.Tensor | None"
    ) -> "torch.Tensor":
        """Return what comes behind each entry, `[1, T, X]`: states, or logits.

        `features_1TF` are the target's (F as `FeatureSpec` gives them, after `take_in`) for known tokens, and whatever
        the proposer passes to `DraftRunner.extend` or `grow` for drafted ones.
        """
        ...


class Level(NamedTuple):
    """Nodes that are fed to a draft tree together; N of them, all of whose parents were fed before.

    Attributes:
        row_N: index of each node's row among the rows of the round; ascending.
        tokens_N: ids, int64.
        parents_N: the node's parent, counted in the order in which its row's nodes were fed from 0; -1: the root.
        features_NX: what goes in beside the tokens, None where nothing does.
    """

    row_N: "torch.Tensor"
    tokens_N: "torch.Tensor"
    parents_N: "torch.Tensor"
    features_NX: "torch.Tensor | None" = None


class DraftRunner(Protocol):
    """What a learned proposer may ask of the worker it lives on. Rows are those handed to `propose`, or some."""

    @property
    def module(self) -> Any:
        """What `build` returned; for `draft_model`, nothing that a proposer should touch."""
        ...

    @property
    def draws_by_path(self) -> bool:
        """Whether guesses are drawn by laws of their own: then those of a tree are drawn behind each node anew."""
        ...

    def features(self, rows: Seq[DraftRow]) -> "torch.Tensor":
        """Return the target's features behind which each row's newest known token was chosen, `[R, F]`."""
        ...

    def newest(self, rows: Seq[DraftRow]) -> "torch.Tensor":
        """Return each row's newest known token, int64 `[R]`."""
        ...

    def catch_up(self, rows: Seq[DraftRow]) -> "torch.Tensor":
        """Feed the module what it has not seen of each row's known tokens; return its output behind them, `[R, X]`."""
        ...

    def extend(
        self, rows: Seq[DraftRow], token_ids: "torch.Tensor", step: int, features: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Feed drafted token number *step* of each row, ids `[R]`; return the module's output behind it, `[R, X]`."""
        ...

    def grow(self, rows: Seq[DraftRow], level: Level) -> "torch.Tensor":
        """Feed one level of each row's tree, behind what `catch_up` fed; return the output behind its nodes, `[N, X]`.

        A node sees the known tokens, its ancestors and itself.
        """
        ...

    def block(
        self,
        rows: Seq[DraftRow],
        row_N: "torch.Tensor",
        tokens_N: "torch.Tensor",
        features_NX: "torch.Tensor | None" = None,
        *,
        sees_all: bool,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Feed, in one forward, what `catch_up` would feed and N drafted tokens behind it, some of each row.

        Args:
            rows: with at least as much room (`k`) as each has tokens, one more where the module's `shift` is 1.
            row_N: index of each token's row, ascending; a row's tokens stand at consecutive positions.
            tokens_N: ids, int64.
            features_NX: what goes in beside the tokens; None where nothing does.
            sees_all: a token sees the known ones and its row's whole block, not only what comes before it in the block.

        Returns:
            The output behind each row's newest known entry, `[R, X]`, and behind the N tokens, `[N, X]`. What the N
            leave in the cache is forgotten.
        """
        ...

    def sample(self, rows: Seq[DraftRow], logits: "torch.Tensor", step: int) -> "torch.Tensor":
        """Return ids `[R]` for drafted token number *step* by the target's pipeline and noise; logits `[R, V]`.

        Penalties count what this round's earlier calls sampled for the row.
        """
        ...

    def candidates(
        self,
        rows: Seq[DraftRow],
        row_N: "torch.Tensor",
        logits_NV: "torch.Tensor",
        depth: int,
        width: int,
        *,
        paths: "Callable[[], torch.Tensor] | None" = None,
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """Return the *width* best ids behind each of N nodes `[N, W]`, best first, and their log-probabilities.

        *paths* returns the *depth* drafted tokens that lead to each node, int64 `[N, D]`. It is asked where
        `draws_by_path`; trees of a proposer that does not say are then drafted in vain.

        The best are those of log q + the target's noise for drafted token number *depth*: with one candidate it is what
        `sample` says, but for edits (penalties, bad words), which are left out. Where there is noise, probabilities are
        the softmax of log q + noise: that the target, which has the same noise, says so. A tree of the likeliest by
        them holds twice as many of its tokens at temperature 1 as one of the likeliest by q. Where `draws_by_path`,
        ids are drawn without replacement, in that order, and their "log-probabilities" depend on the order alone: so
        the shape of a tree that is grown by them tells nothing of what was drawn.
        """
        ...


def on_a_worker(runner: DraftRunner | None, method: str) -> DraftRunner:
    """Return the *runner* that *method* is created with; raises `ConfigError` where there is none."""
    if runner is None:
        raise ConfigError(f"method {method!r} runs on a draft worker, and there is none")
    return runner


class LearnedProposer(Protocol):
    """A proposer with a module. Lives on the draft worker, or in target 0's process."""

    on_worker: ClassVar[bool]

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return what it is fed, by the two `config.json`. Cheap: every target rank asks."""
        ...

    @classmethod
    def build(cls, config: SpeculativeConfig, parts: DraftWeights) -> Module:
        """Make the module. Raises `ModelError` naming the tensor and both shapes where the checkpoint does not fit."""
        ...

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> "LearnedProposer":
        """Return the proposer for a runner of its module."""
        ...

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft a row, of 0 to `row.k` nodes."""
        ...
