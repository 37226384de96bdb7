"""Loads a checkpoint: a Hub id or a folder. Runs no code from it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from protos.config.engine import ModelConfig
from protos.errors import ConfigError, ModelError
from protos.layers import LayerShape
from workers.attention.backend import NAME
from workers.attention.kv import bytes_per_token, stored_dtype
from workers.compile import cpu_computes
from workers.distributed.groups import Group, Solo
from workers.model.loaded import ExecutionMode, LoadedModel
from workers.model.probe import probe_states
from workers.model.quantization import check_quantization, keeper_of, quantization_notes
from workers.model.tensor_parallel import build_shard
from workers.model.torch_mode import TorchMode
from workers.quantization.linear import QuantizedLinear
from workers.recurrent.mixers import adapt
from workers.recurrent.pool import RecurrentShapes, bytes_per_state
from workers.weights import families
from workers.weights.building import BUILDING
from workers.weights.described import read_described, read_json, read_language_config
from workers.weights.files import SAFE, open_file
from workers.weights.finding import check_left_over, missing_error
from workers.weights.hub import WEIGHTS, fetch_model, read_config, shards_by_tensor, weight_files
from workers.weights.keeping import AsValues, Keeper
from workers.weights.load import load_whole
from workers.weights.wrapped import is_wrapped

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float32,
}


UNREADABLE = (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError, StrictDataclassError)
"""What `transformers` raises for configs that it cannot read."""
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "model_max_length")
"""What configs call their context length."""


def load(config: ModelConfig, group: Group | None = None) -> LoadedModel:
    """Load a model.

    Args:
        config: the model.
        group: ranks that share the model and all call this at once; each loads its shard. None: the whole model.

    Raises:
        ModelError: it cannot be found, read or served; the message states why.
        ConfigError: this machine or this model does not support the execution mode.
    """
    described = read_config(config)
    families.check(described, config.model, config.max_model_len)
    device = pick_device(config.device)
    check_quantization(config, described, device)
    folder = fetch_model(config)
    _check_weights(folder, config.model)
    dtype, notes = pick_dtype(config.dtype, described, folder, device)
    limit = context_length(described, config)
    ranks = 1 if group is None else group.size
    mode = _mode_of(config, described)
    mode.check(config.model, device, ranks)
    keeper = keeper_of(config, described, device)
    if group is None or ranks == 1:
        model = _instantiate(folder, config.model, dtype, device, keeper)
    else:
        model = _instantiate_shard(folder, config.model, dtype, device, group, mode, keeper)
    families.hold_frequencies(model)
    recurrent = probe_states(model, config.model) if adapt(model) else {}
    layers = mode.prepare(model, config.model, ranks)
    kv_dtype = stored_dtype(config.kv_cache_dtype, dtype)
    kind = str(described["model_type"])
    notes += _notes(described, layers, dtype, kv_dtype, recurrent)
    notes += tuple(quantization_notes(config, described, model, dtype, device))
    return LoadedModel(
        model=model,
        folder=folder,
        model_type=kind,
        vocab_size=_vocab_size(model, ranks),
        max_model_len=limit,
        eos_ids=_eos_ids(folder, described),
        layers=layers,
        dtype=dtype,
        kv_dtype=kv_dtype,
        device=device,
        mode=mode,
        notes=notes,
        group=Solo() if group is None else group,
        recurrent=recurrent,
    )


def _mode_of(config: ModelConfig, described: Mapping[str, Any]) -> ExecutionMode:
    if not config.batch_invariant:
        return TorchMode()
    if described["model_type"] in families.RECURRENT:
        raise ConfigError(
            f"batch_invariant: {config.model} (model_type {described['model_type']!r}) has recurrent layers, which are "
            "not batch-invariant; serve it without"
        )
    from workers.invariant.mode import BatchInvariantMode  # noqa: PLC0415 - only needed in this mode

    return BatchInvariantMode()


def pick_device(wanted: str) -> torch.device:
    """Return the device for *wanted*: "auto", "cpu" or "cuda"."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ModelError("device is 'cuda', but torch sees no CUDA device; use device='cpu' or 'auto'")
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(wanted)


def pick_dtype(
    wanted: str, described: Mapping[str, Any], folder: Path, device: torch.device
) -> tuple[torch.dtype, tuple[str, ...]]:
    """Return the dtype to load in, and notes. "auto" is the checkpoint's, or fp32 if a CPU cannot compute in it."""
    is_auto = wanted == "auto"
    own = (described.get("dtype") or described.get("torch_dtype") or _stored_dtype(folder)) if is_auto else wanted
    dtype = DTYPES.get(str(own), torch.float32)
    if device.type != "cpu" or cpu_computes(dtype):
        return dtype, ()
    if is_auto:
        return torch.float32, (f"this CPU has no {own} arithmetic: weights are loaded as float32",)
    return dtype, (f"this CPU has no {own} arithmetic; dtype 'auto' does without",)


def _stored_dtype(folder: Path) -> str:
    files = weight_files(folder, folder.name)
    if not files:
        return "F32"
    with open_file(files[0]) as weights:
        kinds = [str(weights.get_slice(name).get_dtype()) for name in weights.keys()]  # noqa: SIM118 - no mapping
    return next((kind for kind in kinds if kind in DTYPES), "F32")


def _check_weights(folder: Path, name: str) -> None:
    for shard in sorted(set(shards_by_tensor(folder, name).values())):
        if not (folder / shard).is_file():
            raise ModelError(f"{name}: the shard {shard} named in the index of its weights is missing")
    if not weight_files(folder, name):
        raise ModelError(f"{name}: there are no weights: none of {', '.join(WEIGHTS)}")


def context_length(described: Mapping[str, Any], config: ModelConfig) -> int:
    """Return the context length of a `config.json`, or the user's smaller limit. Raises `ModelError`."""
    own = _own_length(described)
    if own is None and config.max_model_len is None:
        raise ModelError(f"{config.model}: its config states no context length; set max_model_len")
    if own is not None and config.max_model_len is not None and config.max_model_len > own:
        raise ModelError(f"max_model_len is {config.max_model_len}, but {config.model} was made for {own} positions")
    return int(config.max_model_len or own or 0)


def _own_length(described: Mapping[str, Any]) -> int | None:
    """Return the context length that a `config.json` states; None if it has none."""
    names = reversed(LENGTHS) if described.get("model_type") == "cohere" else LENGTHS
    own = next((int(described[key]) for key in names if described.get(key)), None)
    rope = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if own is not None and "linear" in {rope.get("rope_type"), rope.get("type")}:
        own = max(own, int(described.get("max_sequence_length") or 0))  # Vicuna's; the other length is unscaled
    original = rope.get("original_max_position_embeddings")
    if own is None or not original or "yarn" not in {rope.get("rope_type"), rope.get("type")}:
        return own
    return max(own, int(rope.get("factor", 1) * original))  # where YaRN is turned on by hand, as Qwen's model cards say


def _eos_ids(folder: Path, described: Mapping[str, Any]) -> tuple[int, ...]:
    sources = [described.get("eos_token_id")]
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.append(read_json(generation, folder.name).get("eos_token_id"))
    found: set[int] = set()
    for ids in sources:
        found.update([ids] if isinstance(ids, int) else ids or ())
    return tuple(sorted(found))


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and log messages while it loads."""
    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


def _needs_own_reader(folder: Path, name: str, keeper: Keeper) -> bool:
    """Return whether `transformers` would load more than the language model, need a package, or hold all values.

    It is not asked to read what torch saved, either: `workers.weights.files` maps it into memory, and checks it.
    """
    described = read_described(folder, name)
    is_plain = isinstance(keeper, AsValues) and not described.get("quantization_config") and not is_wrapped(described)
    return not is_plain or any(path.suffix != SAFE for path in weight_files(folder, name))


def _instantiate(folder: Path, name: str, dtype: torch.dtype, device: torch.device, keeper: Keeper) -> Any:
    """Return the `transformers` model, checked to be complete."""
    safely: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        with BUILDING, _quiet():
            config = read_language_config(folder)
            if _needs_own_reader(folder, name, keeper):
                return load_whole(folder, name, config, dtype, device, keeper)
            model, report = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=NAME,
                use_safetensors=True,
                output_loading_info=True,
                **safely,
            )
    except ModelError:
        raise
    except (*UNREADABLE, RuntimeError, SafetensorError) as error:
        raise _unloadable(name, error) from error
    if report["missing_keys"]:
        raise missing_error(name, report["missing_keys"], report["unexpected_keys"])
    check_left_over(name, model, report["unexpected_keys"])
    return model.eval().requires_grad_(False).to(device)


def _instantiate_shard(  # noqa: PLR0917
    folder: Path, name: str, dtype: torch.dtype, device: torch.device, group: Group, mode: ExecutionMode, keeper: Keeper
) -> Any:
    """Return one rank's shard of the model, checked to be complete."""
    try:
        with _quiet():
            config = read_language_config(folder)
            return build_shard(folder, name, config, dtype=dtype, device=device, group=group, mode=mode, keeper=keeper)
    except UNREADABLE as error:
        if isinstance(error, ModelError | ConfigError):
            raise
        raise _unloadable(name, error) from error


def _unloadable(name: str, error: Exception) -> ModelError:
    return ModelError(f"{name} cannot be loaded: {' '.join(str(error).split())[:500]}")


def _vocab_size(model: Any, ranks: int) -> int:
    # A rank's head has only some of the rows, and perhaps padding.
    head = model.get_output_embeddings()
    if isinstance(head, QuantizedLinear):
        return head.out_features if ranks == 1 else int(model.config.vocab_size)
    return int(head.weight.shape[0]) if ranks == 1 else int(model.config.vocab_size)


def _notes(
    described: Mapping[str, Any],
    layers: tuple[LayerShape, ...],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    recurrent: RecurrentShapes,
) -> tuple[str, ...]:
    notes = [f"KV cache: {bytes_per_token(layers, kv_dtype)} bytes per token"]
    if any(shape.values_in_keys for shape in layers):
        notes[0] += " (latents, which keys and values are made of)"
    elif any(shape.key_size != shape.value_size for shape in layers):
        notes[0] += " (keys and values are cached expanded, since their head sizes differ)"
    if recurrent:
        notes.append(
            f"{len(recurrent)} recurrent layers: {bytes_per_state(recurrent)} bytes a state, "
            "num_speculative_tokens + 2 states a sequence, and those of the prefix cache"
        )
    kind = str(described["model_type"])
    if kind not in families.TESTED:
        notes.append(f"model_type {kind!r} is not among the families that are tested")
    return tuple(notes)
