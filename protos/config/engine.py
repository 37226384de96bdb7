"""The engine's configuration: frozen dataclasses, validated on construction.

`protos.config.arguments` builds them from user arguments.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, model_validator
from pydantic.dataclasses import dataclass

from protos.config import early_stop, kv_window
from protos.config.early_stop import ConfidenceThreshold
from protos.config.kv_window import KVWindow
from protos.errors import config_error
from protos.validation import shown, typed

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
MAX_SPECULATIVE_TOKENS = 64
"""Most draft tokens of a row that the target scores in a step. A draft may be fed more of them to choose from."""
DEFAULT_WIDTH, DEFAULT_DEPTH = 4, 6
"""Shape of a dynamic tree where the configuration has none."""

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDtype = Literal["auto", "bfloat16", "fp8", "int8"]
Quantization = Literal[
    "int8", "int4", "fp8", "awq", "gptq", "auto-round", "compressed-tensors", "mxfp4", "fbgemm_fp8", "modelopt"
]
Placement = Literal["dedicated", "colocated"]
RejectionSampleMethod = Literal["coupled", "standard", "block", "synthetic"]
PROBABILISTIC_RULES: frozenset[RejectionSampleMethod] = frozenset({"standard", "block"})
"""Rules that accept with probability p/q: draft tokens must be sampled from a known distribution q."""
ONLY_CHAINS = frozenset({"ngram", "pard", "p_eagle", "dflash"})
GROWN = frozenset({"eagle", "eagle3", "mtp", "draft_model", "self_window"})
"""Methods that draft dynamic trees (EAGLE-2)."""
MOSTLY_CHAINS = ONLY_CHAINS | GROWN | {"suffix"}
"""Methods that draft trees only where the configuration has a shape with branches."""
MAX_LOGPROBS = 20
"""The default of `max_logprobs`."""
PolicyName = Literal["adaptive", "bandit", "threshold", "schedule", "fixed"]
LogFormat = Literal["text", "json"]


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class ModelConfig:
    """Which weights, and how they are loaded. `model` is a Hub id or a folder.

    `generation_config` is the source of sampling defaults: the model ("auto"), none ("vllm"), or a folder.
    `compile_in_background`: serve eager until the models are compiled, where they run in the engine's process.
    `batch_invariant`: the logits of a position are bitwise the same for every batch and number of ranks.
    `kv_cache_dtype`: how K and V are stored; "auto": in the model's dtype. "fp8" (E4M3) and "int8" have a scale for
    each token and head.
    `quantization`: quantise the weights while they are loaded (int8, int4, fp8), or the method by which the checkpoint
    states to be quantised; None: as the checkpoint states.
    `max_logprobs`: log-probabilities that a request may have at a position; -1: no limit.
    `skip_self_check`: serve the target without comparing it with `transformers` on a few tokens.
    """

    model: str = Field(min_length=1)
    tokenizer: str | None = None
    revision: str | None = None
    tokenizer_revision: str | None = None
    download_dir: str | None = None
    dtype: Dtype = "auto"
    kv_cache_dtype: KVCacheDtype = "auto"
    max_model_len: int | None = Field(default=None, gt=0)
    enforce_eager: bool = False
    compile_in_background: bool = False
    batch_invariant: bool = False
    quantization: Quantization | None = None
    skip_self_check: bool = False
    skip_tokenizer_init: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = Field(default=None, gt=0)
    generation_config: str = "auto"
    max_logprobs: int = Field(default=MAX_LOGPROBS, ge=-1)


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class CacheConfig:
    """The paged KV cache. `num_blocks` overrides `memory_bytes`, which overrides `memory_utilization`."""

    block_size: int = Field(default=16, gt=0, le=256)
    num_blocks: int | None = Field(default=None, gt=0)
    memory_bytes: int | None = Field(default=None, gt=0)
    memory_utilization: float = Field(default=0.9, gt=0.0, le=1.0)
    enable_prefix_caching: bool = True


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class SchedulerConfig:
    """Limits of one step, and how steps are planned.

    `max_num_batched_tokens` counts known and draft tokens of all rows. With `async_scheduling`, a GPU may begin a step
    before its plan comes.
    """

    max_num_seqs: int = Field(default=64, gt=0, le=8192)
    max_num_batched_tokens: int = Field(default=2048, gt=0, le=2**22)
    enable_chunked_prefill: bool = True
    async_scheduling: bool = True


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class SpeculativeConfig:
    """How draft tokens are proposed and verified. `method` names a registered proposer, or several for a cascade.

    Attributes:
        quantization: as in `ModelConfig`, for the draft.
        num_speculative_tokens: most nodes of a draft that the target scores, a chain or a tree.
        kv_cache_dtype: of the draft's KV cache, see `ModelConfig`; None: as for the target.
        speculative_token_tree: nodes of a static tree, as paths of ranks, parents first; None: the method's default.
        eagle_topk: children of a node and nodes fed per level of a dynamic tree; beams of `recurrent`; 1: chains.
        num_steps: levels of a dynamic tree; None: the method's default.
        draft_shape: a chain, a tree with branches, or the method's default.
        draft_block_size: positions that a DFlash checkpoint is fed in one forward, as its config states; set when the
            configuration is read, not by users. 0: as many as needed.
        has_default_shape: `protos.config.default_shape` sets the shape once the device is known.
        use_heterogeneous_vocab: `draft_model` has another tokenizer than the target.
        suffix_decoding_max_bytes: memory for all answers together.
        datastore: file written by `slipstream build-datastore`, for `rest`.
        lookahead_window, lookahead_ngram, lookahead_guesses: W, N and G of Fu et al. 2024; a draft has up to
            (W + G) * (N - 1) nodes.
        policy: how many draft tokens each row gets. "adaptive": as many as pay, by measured costs and acceptance;
            "bandit": as many as were fastest; "threshold": all or none, by batch size; "schedule": by the table of
            batch sizes; "fixed": always all. None: see `policy_name`.
        rejection_sample_method: the acceptance rule. "coupled": accept draft tokens equal to the sampled ones, with
            shared noise; "standard" and "block": rejection sampling with probability p/q; "synthetic": at given rates,
            regardless of the target.
        draft_sample_method: with "standard" and "block", whether a learned draft samples its tokens or takes the most
            likely ones; no effect otherwise.
        assistant_confidence_threshold: a draft ends after a token whose probability, by the draft, is lower; "auto":
            where a further token would not pay.
        draft_kv_window, draft_kv_sinks: the draft attends to the last and to the first so many positions; None: to all,
            and `kv_window.DEFAULT_SINKS`.
        synthetic_acceptance_rates: probability that the draft token at each depth and all before it are accepted.
        synthetic_acceptance_length: mean number of tokens per round, the target's own included.
    """

    method: str | tuple[str, ...]
    num_speculative_tokens: int = Field(gt=0, le=MAX_SPECULATIVE_TOKENS)
    model: str | None = Field(default=None, min_length=1)
    revision: str | None = None
    dtype: Dtype = "auto"
    kv_cache_dtype: KVCacheDtype | None = None
    quantization: Quantization | None = None
    max_model_len: int | None = Field(default=None, gt=0)
    enforce_eager: bool | None = None
    draft_tensor_parallel_size: int = Field(default=1, ge=1, le=1)
    placement: Placement | None = None  # `arguments.parse` sets the default: dedicated on ray, colocated on uni
    speculative_token_tree: tuple[tuple[int, ...], ...] | None = None
    eagle_topk: int = Field(default=1, gt=0, le=MAX_SPECULATIVE_TOKENS)
    num_steps: int | None = Field(default=None, gt=0, le=MAX_SPECULATIVE_TOKENS)
    prompt_lookup_min: int = Field(default=5, gt=0)
    prompt_lookup_max: int = Field(default=5, gt=0)
    draft_shape: Literal["auto", "chain", "tree"] = "auto"
    draft_block_size: int = Field(default=0, ge=0)
    has_default_shape: bool = False
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
    policy: PolicyName | None = None
    rejection_sample_method: RejectionSampleMethod = "coupled"
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    assistant_confidence_threshold: ConfidenceThreshold = None
    draft_kv_window: int | None = Field(default=None, ge=1)
    draft_kv_sinks: int | None = Field(default=None, ge=0)
    synthetic_acceptance_rates: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...] | None = None
    synthetic_acceptance_length: float | None = Field(default=None, ge=1.0)

    @model_validator(mode="after")
    def _translation(self) -> "SpeculativeConfig":
        if self.use_heterogeneous_vocab and "draft_model" not in self.methods:
            raise ValueError(f"use_heterogeneous_vocab is for method 'draft_model', got {', '.join(self.methods)}")
        return self

    @model_validator(mode="after")
    def _early_stop(self) -> "SpeculativeConfig":
        trees = self.rejection_sample_method if self.may_branch else None
        early_stop.checked(self.assistant_confidence_threshold, self.methods, GROWN, trees)
        return self

    @model_validator(mode="after")
    def _window(self) -> "SpeculativeConfig":
        kv_window.checked(self.draft_kv_window, self.draft_kv_sinks, self.methods)
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
        """Siblings are sampled without replacement and verified in order: a gap would bias the rest."""
        if not self.is_probabilistic:
            return self
        choices = set(self.speculative_token_tree or ())
        for choice in sorted(choices):
            before = (*choice[:-1], choice[-1] - 1)
            if choice[-1] and before not in choices:
                raise ValueError(
                    f"speculative_token_tree has {list(choice)} but not {list(before)}: with "
                    f"rejection_sample_method {self.rejection_sample_method!r} the children of a node "
                    "must be its first ones"
                )
        return self

    @model_validator(mode="after")
    def _one_policy(self) -> "SpeculativeConfig":
        needs = {"threshold": self.disable_by_batch_size, "schedule": self.num_speculative_tokens_per_batch_size}
        for name, value in needs.items():
            if value is not None and self.policy not in (None, name):
                raise ValueError(f"policy {self.policy!r} has no use for what policy {name!r} reads: {shown(value)}")
        if self.policy == "schedule" and self.num_speculative_tokens_per_batch_size is None:
            raise ValueError("policy 'schedule' needs num_speculative_tokens_per_batch_size")
        return self

    @property
    def policy_name(self) -> PolicyName:
        """The policy; where none is named, the one that reads the table or threshold that was given, or `adaptive`."""
        if self.policy is not None:
            return self.policy
        if self.num_speculative_tokens_per_batch_size is not None:
            return "schedule"
        return "adaptive" if self.disable_by_batch_size is None else "threshold"

    @property
    def may_branch(self) -> bool:
        """Whether drafts may have more nodes than levels."""
        if self.draft_shape == "chain":
            return False
        is_tree = self.draft_shape == "tree" or self.eagle_topk > 1 or self.speculative_token_tree is not None
        chains = ONLY_CHAINS if is_tree else MOSTLY_CHAINS
        return not chains.issuperset(self.methods)

    @property
    def tree_shape(self) -> tuple[int, int]:
        """Width and levels of a dynamic tree; 1 and `num_speculative_tokens` for chains."""
        width = DEFAULT_WIDTH if self.draft_shape == "tree" and self.eagle_topk == 1 else self.eagle_topk
        if self.draft_shape == "chain" or width == 1:
            return 1, self.num_speculative_tokens
        return width, min(self.num_steps or DEFAULT_DEPTH, self.num_speculative_tokens)

    @property
    def draft_places(self) -> int:
        """Places of a row's KV blocks that drafting takes: for the nodes of a draft, or for those fed to the draft.

        To grow a dynamic tree, the draft is fed the `eagle_topk` best nodes of each level but the last. DFlash is fed a
        whole block.
        """
        if GROWN.isdisjoint(self.methods):
            return max(self.num_speculative_tokens, self.draft_block_size)
        width, levels = self.tree_shape
        return max(self.num_speculative_tokens, width * (levels - 1))

    @property
    def kv_window(self) -> KVWindow | None:
        """What the draft reads of its K and V; None: everything."""
        return kv_window.kv_window(self.draft_kv_window, self.draft_kv_sinks)

    @property
    def is_probabilistic(self) -> bool:
        """Whether the acceptance rule guarantees the distribution, and not the same tokens."""
        return self.rejection_sample_method in PROBABILISTIC_RULES

    @property
    def samples_drafts(self) -> bool:
        """Whether a learned draft samples its tokens from distributions that the acceptance rule reads."""
        return self.is_probabilistic and self.draft_sample_method == "probabilistic"

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """Acceptance rate at each depth; for a given length, 1 up to that depth, and the fraction after it."""
        if self.synthetic_acceptance_length is None:
            return self.synthetic_acceptance_rates or ()
        wanted = self.synthetic_acceptance_length - 1
        return tuple(min(1.0, max(0.0, wanted - depth)) for depth in range(self.num_speculative_tokens))

    @property
    def methods(self) -> tuple[str, ...]:
        """One method, or those of a cascade in order."""
        return (self.method,) if isinstance(self.method, str) else self.method


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class ParallelConfig:
    """How many devices, and how they are placed.

    Attributes:
        min_tensor_parallel_size: a lost target group for which there is no room is rebuilt over fewer ranks, this many
            at least; None: never.
        placement_strategy: of the placement group: STRICT_PACK is one node, PACK one node for the targets, SPREAD many.
        worker_resources: Ray resources of each worker, such as {"GPU": 0.5}; None for one GPU, if there are any.
        placement_timeout_s: seconds a start waits for room in the cluster.
        rebuild_timeout_s: seconds a lost target group waits for room before requests are refused; servers set 30.
        spare_workers: processes that wait, with everything imported, to replace a lost target rank, on Ray.
    """

    tensor_parallel_size: int = Field(default=1, gt=0)
    min_tensor_parallel_size: int | None = Field(default=None, gt=0)
    executor: Literal["uni", "ray"] = "uni"
    placement_strategy: Literal["STRICT_PACK", "PACK", "SPREAD"] = "STRICT_PACK"
    worker_resources: dict[str, Annotated[float, Field(gt=0)]] | None = None
    placement_timeout_s: float = Field(default=600.0, gt=0)
    rebuild_timeout_s: float = Field(default=300.0, gt=0)
    spare_workers: int = Field(default=1, ge=0, le=8)

    @model_validator(mode="after")
    def _least_ranks(self) -> "ParallelConfig":
        least, ranks = self.min_tensor_parallel_size, self.tensor_parallel_size
        if least is not None and least > ranks:
            raise ValueError(f"min_tensor_parallel_size must be at most tensor_parallel_size ({ranks}), got {least}")
        return self


@typed(config_error)
@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """The whole configuration. `seed` makes the seeds of requests without one repeatable."""

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

    @property
    def mixes_seeds(self) -> bool:
        """Whether a number of its own is mixed into the seed of each request.

        A draft may be an earlier answer with the same seed, whose noise it would otherwise tell a probabilistic rule.
        """
        return self.speculative is not None and self.speculative.is_probabilistic

    @property
    def max_draft(self) -> int:
        """The largest number of draft tokens of a row."""
        return 0 if self.speculative is None else self.speculative.num_speculative_tokens


_JSON = TypeAdapter(EngineConfig)


def to_json(config: EngineConfig) -> str:
    """Return *config* as JSON text, to send it to another process."""
    return _JSON.dump_json(config).decode()


def from_json(text: str) -> EngineConfig:
    """Return the configuration that `to_json` wrote."""
    return _JSON.validate_json(text)
