"""The memory of recurrent states, of target, draft and prefix cache, beside the KV blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from protos.capacity import kv_summary
from protos.config.arguments import parse
from protos.config.engine import EngineConfig
from protos.errors import ConfigError
from tests.support.models.tiny_models import build
from workers.build import LoadedTarget, blocks_of_draft, load_target
from workers.distributed.groups import Solo
from workers.draft.load import load_draft
from workers.recurrent.limits import STATES_SHARE
from workers.recurrent.pool import bytes_per_slot, bytes_per_state

SLOTS, K = 3, 4
MEMORY = 1 << 18
LONG: dict[str, Any] = {"max_position_embeddings": 4096}


def configure(model: Path, draft: Path | None = None, **options: Any) -> EngineConfig:
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": K}
    return parse(
        {
            "model": str(model),
            "dtype": "float32",
            "device": "cpu",
            "skip_tokenizer_init": True,
            "max_num_seqs": SLOTS,
            "max_model_len": 4096,
            "block_size": 4,
            "kv_cache_memory_bytes": MEMORY,
            "speculative_config": speculative if draft else None,
            **options,
        }
    )


def loaded(config: EngineConfig) -> LoadedTarget:
    return load_target(config, Solo(), lambda line: None, with_draft=True)


def used(target: LoadedTarget, config: EngineConfig) -> int:
    """Return the bytes of everything that is allocated."""
    info, places = target.info(config), K if config.speculative else 0
    assert info.prefix_states is not None
    models = [target.model.recurrent] + ([target.draft.recurrent] if target.draft else [])
    states = SLOTS * sum(bytes_per_slot(shapes, places) for shapes in models)
    return (
        states
        + info.prefix_states * bytes_per_state(target.model.recurrent)
        + info.num_blocks * target.block_bytes(config.cache.block_size)
    )


@pytest.mark.parametrize("drafts", [False, True])
def test_all_states_are_counted(drafts: bool, tmp_path: Path) -> None:
    model = build("qwen3_next", tmp_path / "target", **LONG)
    config = configure(model, build("bamba", tmp_path / "draft", **LONG) if drafts else None)
    target = loaded(config)
    each = target.block_bytes(4)
    assert target.info(config).prefix_states == 2 * SLOTS
    assert MEMORY - 3 * each < used(target, config) <= MEMORY
    assert "6 recurrent states for the prefix cache" in kv_summary(target.info(config))


def test_those_of_the_prefix_cache_take_a_quarter_at_most(tmp_path: Path) -> None:
    model = build("qwen3_next", tmp_path, **LONG)
    target = loaded(configure(model))
    state = bytes_per_state(target.model.recurrent)
    for memory in (12 * state, 20 * state):
        config = configure(model, kv_cache_memory_bytes=memory)
        left = memory - SLOTS * 2 * state
        assert (target.info(config).prefix_states or 0) in {int(STATES_SHARE * left / state) - n for n in (0, 1)}
        assert used(target, config) <= memory
    config = configure(model, enable_prefix_caching=False)
    assert target.info(config).prefix_states == 0


def test_a_draft_in_a_process_of_its_own(tmp_path: Path) -> None:
    draft = build("bamba", tmp_path / "draft", **LONG)
    config = configure(build("llama", tmp_path / "target", **LONG), draft)
    found = load_draft(config, None, lambda line: None)
    assert found is not None
    each, states = found.bytes_per_block(4), SLOTS * bytes_per_slot(found.recurrent, K)
    assert states > 0
    assert blocks_of_draft(config, found, torch.device("cpu")) == (MEMORY - states) // each
    small = configure(tmp_path / "target", draft, kv_cache_memory_bytes=states)
    with pytest.raises(ConfigError, match="the recurrent states of 3 sequences take"):
        blocks_of_draft(small, found, torch.device("cpu"))
