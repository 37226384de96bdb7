"""Frozen engine configuration: validated once, at the edge, then passed in parts to whoever needs that part.

`protos.config.arguments` turns what users write (vLLM's argument names, flags, YAML, removed names) into these.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from protos.errors import config_error
from protos.validation import shown, typed

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
MAX_SPECULATIVE_TOKENS = 64

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Placement = Literal["dedicated", "colocated"]
RejectionSampleMethod = Literal["coupled", "standard", "block", "synthetic"]
BY_LAWS: frozenset[RejectionSampleMethod] = frozenset({"standard", "block"})
"""Rules that judge by p/q: what was drafted must have been drawn by a law of its own."""
LogFormat = Literal["text", "json"]


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Which weights, and how they are loaded. `model` is a Hub id or a folder.

    `generation_config` says whose sampling defaults count: the model's own ("auto"), nobody's ("vllm"), a folder's.
    `batch_invariant`: the logits of a position are the same bits, whatever is computed beside it and on how many ranks.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    dtype: Dtype = "auto"
    max_model_len: int | None = Field(default=None, gt=0)
    enforce_eager: bool = False
    batch_invariant: bool = False
    skip_tokenizer_init: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = Field(default=None, gt=0)
    generation_config: str = "auto"


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class CacheConfig:
    """The paged KV cache. `num_blocks` wins over `memory_bytes`, which wins over `memory_utilization`."""

    block_size: int = Field(default=16, gt=0, le=256)
    num_blocks: int | None = Field(default=None, gt=0)
    memory_bytes: int | None = Field(default=None, gt=0)
    memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    enable_prefix_caching: bool = True


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class SchedulerConfig:
    """Who runs in a step. `max_num_batched_tokens` counts known and draft tokens of all rows."""

    max_num_seqs: int = Field(default=64, gt=0, le=8192)
    max_num_batched_tokens: int = Field(default=2048, gt=0, le=2**22)
    enable_chunked_prefill: bool = True


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class SpeculativeConfig:
    """How guesses are made and judged. `method` names a registered proposer, several for a cascade.

    Attributes:
        num_speculative_tokens: nodes of a draft at most, be it a chain or a tree.
        speculative_token_tree: nodes of a tree of settled shape, as paths of ranks, parents first; None: the method's.
        eagle_topk: children of a node and nodes fed of a level, where trees are grown; beams of `recurrent`; 1: chains.
        num_steps: levels of a grown tree; None: the method's.
        draft_shape: a chain, a tree with branches, or what is best for the method.
        use_heterogeneous_vocab: the tokenizer of `draft_model` is another than the target's.
        suffix_decoding_max_bytes: memory for all past answers together.
        datastore: file that `slipstream build-datastore` wrote, for `rest`.
        lookahead_window, lookahead_ngram, lookahead_guesses: W, N and G of Fu et al. 2024; a draft has up to
            (W + G) * (N - 1) nodes.
        rejection_sample_method: the rule of acceptance. "coupled": sample and match, with shared noise; "standard" and
            "block": by p/q; "synthetic": by rates given, whatever the target says.
        draft_sample_method: under "standard" and "block", whether a learned draft draws its guesses, or says the
            likeliest ones; means nothing under the others.
        synthetic_acceptance_rates: how often the guess at each depth is kept, and all before it.
        synthetic_acceptance_length: tokens of a round on average, the target's own included.
    """

    method: str | tuple[str, ...]
    num_speculative_tokens: int = Field(gt=0, le=MAX_SPECULATIVE_TOKENS)
    model: str | None = None
    revision: str | None = None
    dtype: Dtype = "auto"
    max_model_len: int | None = Field(default=None, gt=0)
    enforce_eager: bool | None = None
    draft_tensor_parallel_size: int = Field(default=1, ge=1, le=1)
    placement: Placement | None = None  # `arguments.parse` settles it: dedicated on ray, colocated on uni
    speculative_token_tree: tuple[tuple[int, ...], ...] | None = None
    eagle_topk: int = Field(default=1, gt=0, le=MAX_SPECULATIVE_TOKENS)
    num_steps: int | None = Field(default=None, gt=0, le=MAX_SPECULATIVE_TOKENS)
    prompt_lookup_min: int = Field(default=5, gt=0)
    prompt_lookup_max: int = Field(default=5, gt=0)
    draft_shape: Literal["auto", "chain", "tree"] = "auto"
    use_heterogeneous_vocab: bool = False
    suffix_decoding_max_tree_depth: int = Field(default=24, ge=2, le=1024)
    suffix_decoding_max_cached_requests: int = Field(default=10_000, ge=0)
    suffix_decoding_max_spec_factor: float = Field(default=1.0, ge=0.0)
    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    suffix_decoding_max_bytes: int = Field(default=256 << 20, ge=1 << 20, le=32 << 30)
    datastore: str | None = None
    lookahead_window: int = Field(default=7, gt=0)
    lookahead_ngram: int = Field(default=5, ge=2)
    lookahead_guesses: int = Field(default=7, gt=0)
    disable_by_batch_size: int | None = Field(default=None, gt=0)
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    rejection_sample_method: RejectionSampleMethod = "coupled"
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    synthetic_acceptance_rates: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] | None = None
    synthetic_acceptance_length: float | None = Field(default=None, ge=1.0)

    @model_validator(mode="after")
    def _translation(self) -> "SpeculativeConfig":
        if self.use_heterogeneous_vocab and "draft_model" not in self.methods:
            raise ValueError(f"use_heterogeneous_vocab is for method 'draft_model', got {', '.join(self.methods)}")
        return self

    @model_validator(mode="after")
    def _lookup_range(self) -> "SpeculativeConfig":
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low > high:
            raise ValueError(f"prompt_lookup_min must be at most prompt_lookup_max ({high}), got {low}")
        return self

    @model_validator(mode="after")
    def _synthetic(self) -> "SpeculativeConfig":
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        most, num_given = self.num_speculative_tokens, (rates is not None) + (length is not None)
        if num_given != (self.rejection_sample_method == "synthetic"):
            raise ValueError(
                "rejection_sample_method 'synthetic' needs one of synthetic_acceptance_rates and "
                f"synthetic_acceptance_length, and no other rule takes any; got {num_given} of them with "
                f"{self.rejection_sample_method!r}"
            )
        if length is not None and length > most + 1:
            raise ValueError(
                f"synthetic_acceptance_length must be at most num_speculative_tokens + 1 ({most + 1}), got {length}"
            )
        if rates is not None and (len(rates) != most or list(rates) != sorted(rates, reverse=True)):
            raise ValueError(
                "synthetic_acceptance_rates must be one rate for each of num_speculative_tokens "
                f"({most}), none above the one before, got {shown(rates)}"
            )
        return self

    @model_validator(mode="after")
    def _tree_without_gaps(self) -> "SpeculativeConfig":
        """What is drawn without replacement is tried in the order drawn: to leave one out would tilt the rest."""
        choices = set(self.speculative_token_tree or ()) if self.rejection_sample_method in BY_LAWS else set()
        for choice in sorted(choices):
            before = (*choice[:-1], choice[-1] - 1)
            if choice[-1] and before not in choices:
                raise ValueError(
                    f"speculative_token_tree has {list(choice)} but not {list(before)}: under "
                    f"rejection_sample_method {self.rejection_sample_method!r} the children of a node "
                    "must be its first ones"
                )
        return self

    @property
    def draws_guesses(self) -> bool:
        """Whether a learned draft draws its guesses, by laws that the rule is told."""
        return self.rejection_sample_method in BY_LAWS and self.draft_sample_method == "probabilistic"

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """How often the guess at each depth is kept; of all that have the length asked for, those that vary least."""
        if self.synthetic_acceptance_length is None:
            return self.synthetic_acceptance_rates or ()
        wanted = self.synthetic_acceptance_length - 1
        return tuple(min(1.0, max(0.0, wanted - depth)) for depth in range(self.num_speculative_tokens))

    @property
    def methods(self) -> tuple[str, ...]:
        """In the order in which they are asked: one, or several in a cascade."""
        return (self.method,) if isinstance(self.method, str) else self.method


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """How many devices, and who places them.

    Attributes:
        placement_strategy: of the placement group: STRICT_PACK is one node, PACK one node for the targets, SPREAD many.
        worker_resources: what each worker asks Ray for, such as {"GPU": 0.5}; None for one GPU where there are any.
        placement_timeout_s: how long a start waits for room in the cluster.
        rebuild_timeout_s: how long a lost target group waits for room.
    """

    tensor_parallel_size: int = Field(default=1, gt=0)
    executor: Literal["uni", "ray"] = "uni"
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD"] = "STRICT_PACK"
    worker_resources: dict[str, Annotated[float, Field(gt=0)]] | None = None
    placement_timeout_s: float = Field(default=600.0, gt=0)
    rebuild_timeout_s: float = Field(default=300.0, gt=0)


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """Everything an engine is built from. `seed` makes the seeds of requests without one repeatable."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativeConfig | None = None
    seed: int | None = Field(default=None, ge=0, le=2**64 - 1)
    served_model_name: tuple[str, ...] = ()
    disable_log_stats: bool = False
    log_requests: bool = False
    log_format: LogFormat = "text"
