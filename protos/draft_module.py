"""Protocols of learned proposers, and of the worker that runs them.

A learned proposer has two parts. Its *module* is a torch module, built from a checkpoint: weights, forward, and the K/V
shapes of its attention layers, if any. The *proposer* has the worker run the module over paged KV, samples tokens with
the target's own sampler, and builds drafts from them. Neither imports `workers`: attention in a module uses the
function that `transformers` has registered as `DraftWeights.attention`.
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
    """What a module is built from: the draft's checkpoint, and modules shared with the target."""

    @property
    def folder(self) -> Path | None:
        """Folder of the draft's checkpoint; None if it is part of the target's."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """The draft's `config.json`; the target's if the draft is part of it."""
        ...

    @property
    def target_config(self) -> Mapping[str, Any]:
        """The target's `config.json`."""
        ...

    @property
    def attention(self) -> str:
        """Name of the `attn_implementation` that reads and writes paged KV."""
        ...

    @property
    def dtype(self) -> "torch.dtype":
        """Dtype of the computation."""
        ...

    @property
    def device(self) -> "torch.device":
        """Device of the computation."""
        ...

    def tensors(self, prefix: str = "") -> "dict[str, torch.Tensor]":
        """Read the draft's tensors, from the target's checkpoint if the draft is part of it.

        Only those whose names begin with *prefix*, which is removed. Dtype as stored, on the CPU. Quantised weights of
        the target's checkpoint are dequantised.
        """
        ...

    def embedding(self) -> "torch.nn.Module":
        """Return the target's input embedding, ids `[...]` -> `[..., Ht]`, in `dtype` on `device`."""
        ...

    def head(self) -> "Callable[[torch.Tensor], torch.Tensor]":
        """Return the target's head, states `[..., Ht]` -> logits `[..., V]`, with its scaling and soft cap."""
        ...


class Module(Protocol):
    """A draft's `torch.nn.Module`, in eval mode, without gradients.

    Attributes:
        layers: K/V shape of each attention layer, in the order of their `layer_idx`; empty if there are none.
        shift: 1 if the input at position i is token i + 1 and the target's features of position i (the EAGLE family and
            MTP), 0 if it is token i alone.
        max_model_len: the longest text that it can continue.
        vocab_size: larger ids are replaced before they are fed (shift 0) or never drafted.
        compiled_methods: names of the methods that may be compiled; a module without this attribute runs eager. They
            take tensors whose dimension 0 (of `forward`: 1) counts tokens, and perhaps a step; their results depend on
            nothing else. The values count the different computations: step s computes as s modulo this does.
    """

    layers: tuple[LayerShape, ...]
    shift: int
    max_model_len: int
    vocab_size: int

    def take_in(self, features_TF: "torch.Tensor") -> "torch.Tensor":
        """Project the target's features, `[T, F] -> [T, X]`, before they are stored: `fc` of EAGLE-3."""
        ...

    def __call__(
        self, tokens_1T: "torch.Tensor", positions_1T: "torch.Tensor", features_1TF: "torch.Tensor | None"
    ) -> "torch.Tensor":
        """Return the output at each position, `[1, T, X]`: states, or logits.

        `features_1TF` are the target's for known tokens (those of `FeatureSpec`, after `take_in`), and those passed to
        `DraftRunner.extend` or `grow` for draft tokens.
        """
        ...


class Level(NamedTuple):
    """N nodes of draft trees that are fed together; their parents were fed before.

    Attributes:
        row_N: index of each node's row among the rows of the round; ascending.
        tokens_N: ids, int64.
        parents_N: the node's parent, as an index into its row's nodes in the order fed; -1: the root.
        features_NX: features fed with the tokens, None if there are none.
    """

    row_N: "torch.Tensor"
    tokens_N: "torch.Tensor"
    parents_N: "torch.Tensor"
    features_NX: "torch.Tensor | None" = None


class DraftRunner(Protocol):
    """What the draft worker offers a learned proposer. Rows are those passed to `propose`, or a subset."""

    @property
    def module(self) -> Any:
        """The module that `build` returned; not for use by `draft_model`."""
        ...

    @property
    def draws_by_path(self) -> bool:
        """Whether draft tokens are sampled from distributions of their own, separately for each node of a tree."""
        ...

    def features(self, rows: Seq[DraftRow]) -> "torch.Tensor":
        """Return the target's features from which each row's newest known token was sampled, `[R, F]`."""
        ...

    def newest(self, rows: Seq[DraftRow]) -> "torch.Tensor":
        """Return each row's newest known token, int64 `[R]`."""
        ...

    def catch_up(self, rows: Seq[DraftRow]) -> "torch.Tensor":
        """Feed the known tokens not fed before; return the output of the last one of each row, `[R, X]`."""
        ...

    def extend(
        self, rows: Seq[DraftRow], token_ids: "torch.Tensor", step: int, features: "torch.Tensor | None" = None
    ) -> "torch.Tensor":
        """Feed draft token number *step* of each row, ids `[R]`; return its output, `[R, X]`."""
        ...

    def grow(self, rows: Seq[DraftRow], level: Level) -> "torch.Tensor":
        """Feed one level of each row's tree, after `catch_up`; return the output of its nodes, `[N, X]`.

        A node attends to the known tokens, its ancestors and itself.
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
        """Feed, in one forward, the tokens that `catch_up` would feed and a block of draft tokens per row, N in all.

        Args:
            rows: with `room` for at least the row's block; it may be one larger if the module's `shift` is 1.
            row_N: index of each token's row, ascending; a row's tokens have consecutive positions.
            tokens_N: ids, int64.
            features_NX: features fed with the tokens; None if there are none.
            sees_all: a token attends to its row's whole block, unless its layer is restricted; else only to the tokens
                before it.

        Returns:
            The output of each row's newest known token, `[R, X]`, and of the N tokens, `[N, X]`. The KV of the N tokens
            is discarded.
        """
        ...

    def sample(self, rows: Seq[DraftRow], logits: "torch.Tensor", step: int) -> "torch.Tensor":
        """Sample draft token number *step* with the target's sampler and noise: ids `[R]` from logits `[R, V]`.

        Penalties count the tokens sampled for the row earlier in this round.
        """
        ...

    def goes_on(self, rows: Seq[DraftRow]) -> Seq[bool]:
        """Return whether each row's chain should have another token after the one that was just sampled.

        False where the draft's confidence is too low (`assistant_confidence_threshold`). The sampled token stays part
        of the chain: leaving it out for what it is would bias the rules of rejection sampling.
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
        """Return the *width* best ids for the children of N nodes `[N, W]`, best first, and their log-probabilities.

        *paths* returns the *depth* draft tokens on the path to each node, int64 `[N, D]`. It is called if
        `draws_by_path`; without it, no token of the tree can then be accepted.

        The best ids maximise log q + the target's noise for draft token number *depth*: the first one is what `sample`
        returns, except that penalties and bad words are ignored. With noise, the probabilities are the softmax of
        log q + noise: the probability that the target, with the same noise, samples the token. At temperature 1, a tree
        ranked by them contains twice as many of the target's tokens as one ranked by q. With `draws_by_path`, ids are
        sampled without replacement, in order, and their "log-probabilities" depend on the order alone, so that the
        shape of a dynamic tree is independent of the tokens sampled.
        """
        ...


def on_a_worker(runner: DraftRunner | None, method: str) -> DraftRunner:
    """Return *runner*; raise `ConfigError` if it is None."""
    if runner is None:
        raise ConfigError(f"method {method!r} runs on a draft worker, but there is none")
    return runner


class LearnedProposer(Protocol):
    """A proposer with a module. Runs on the draft worker, or in target rank 0's process."""

    on_worker: ClassVar[bool]

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        """Return the features it is fed, from the two `config.json`. Cheap: called by every target rank."""
        ...

    @classmethod
    def build(cls, config: SpeculativeConfig, weights: DraftWeights) -> Module:
        """Build the module. Raises `ModelError` naming the tensor and both shapes if the checkpoint does not fit."""
        ...

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> "LearnedProposer":
        """Return a proposer for the runner of its module."""
        ...

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        """Return one draft per row, of 0 to `row.k` nodes in at most `row.depth` levels."""
        ...
