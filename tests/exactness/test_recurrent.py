"""Targets with recurrent layers: the same tokens as `transformers`, whatever drafts, under preemption and aborts.

Chains of every length, with prefix hits, are in `test_recurrent_prefixes`.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from protos.errors import ConfigError
from slipstream import LLM, SamplingParams
from tests.exactness.test_identity import COUNT, NGRAM, mixed_prompts, run
from tests.support.identity import Reference, assert_identical, generate, perturbed
from tests.support.models import synthetic_layers
from tests.support.models.tiny_models import build
from tests.support.recurrent.tiny_hybrids import HYBRIDS

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("lfm2",)
PARAMS = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.mark.parametrize(
    "family", [family if family in QUICK else pytest.param(family, marks=pytest.mark.full) for family in HYBRIDS]
)
def test_greedy_equals_transformers_with_and_without_speculation(family: str, tmp_path: Path) -> None:
    """The draft is a copy with noise, so it has recurrent layers, too."""
    model = build(family, tmp_path / "target")
    draft = perturbed(model, tmp_path / "draft")
    reference = Reference(model)
    wanted = [reference.greedy(prompt, COUNT) for prompt in mixed_prompts()]
    off = run(model, None)
    assert (off.proposed, off.preemptions > 0) == (0, True)
    assert_identical(mixed_prompts(), off.outputs, wanted, reference)
    for speculative in (NGRAM, {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}):
        on = run(model, speculative)
        assert_identical(mixed_prompts(), on.outputs, wanted, reference)
        assert on.proposed > on.accepted > 0 or speculative is NGRAM


def test_drafts_of_other_models(tmp_path: Path) -> None:
    """A draft with attention alone, a head that reads hidden states, and a draft with recurrent layers alone."""
    hybrid, plain = build("qwen3_next", tmp_path / "hybrid"), build("llama", tmp_path / "plain")
    head = synthetic_layers.eagle3(hybrid, kept=12).write(tmp_path / "head")
    prompts = mixed_prompts()[:3]
    for target, draft, method in (
        (hybrid, plain, "draft_model"),
        (plain, hybrid, "draft_model"),
        (hybrid, head, "eagle3"),
    ):
        off = generate(target, prompts, PARAMS)
        speculative = {"method": method, "model": str(draft), "num_speculative_tokens": 3, "draft_shape": "chain"}
        on = generate(target, prompts, PARAMS, speculative_config=speculative)
        assert_identical(prompts, on.outputs, off.outputs, Reference(target))
        assert on.proposed > 0


def with_mtp(family: str, folder: Path) -> Path:
    """A target whose checkpoint has an MTP layer, named as Qwen names it."""
    build(family, folder, layer_types=["linear_attention", "linear_attention", "full_attention"], mlp_only_layers=[])
    path, generator = folder / "model.safetensors", torch.Generator().manual_seed(4)
    tensors = load_file(path)
    last = {name.removeprefix("model.layers.2."): weight for name, weight in tensors.items() if ".layers.2." in name}
    noisy = {name: weight + 0.1 * torch.randn(weight.shape, generator=generator) for name, weight in last.items()}
    tensors |= {f"mtp.layers.0.{name}": weight for name, weight in noisy.items()}
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(32), torch.eye(32)], 1)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{norm}.weight"] = torch.zeros(32)
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


def test_mtp_layers_of_the_target(tmp_path: Path) -> None:
    target = with_mtp("qwen3_next", tmp_path / "target")
    prompts = [[5, 6, 7] * 6, [9, 4, 9, 4, 9], list(range(3, 30))]
    off = generate(target, prompts, PARAMS)
    speculative = {"method": "mtp", "num_speculative_tokens": 3, "draft_shape": "chain"}
    on = generate(target, prompts, PARAMS, speculative_config=speculative)
    assert_identical(prompts, on.outputs, off.outputs, Reference(target))
    assert on.proposed > 0


def test_the_slots_of_aborted_requests_are_used_again(tmp_path: Path) -> None:
    model = build("granitemoehybrid", tmp_path)
    reference = Reference(model)
    prompts = mixed_prompts()
    wanted = [reference.greedy(prompt, 16) for prompt in prompts]
    rng = random.Random(3)
    with LLM(
        model=str(model), dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=3,
        speculative_config={**NGRAM, "policy": "fixed"},
    ) as llm:  # fmt: skip
        for _ in range(2):
            order = rng.sample(range(len(prompts)), 4)
            for stream in [llm.stream({"prompt_token_ids": prompts[i]}, PARAMS) for i in order]:
                for _, _ in zip(range(rng.randrange(1, 4)), stream, strict=False):
                    pass
                stream.close()
            found = llm.generate([{"prompt_token_ids": prompts[i]} for i in order], PARAMS, use_tqdm=False)
            ours = [list(result.outputs[0].token_ids) for result in found]
            assert_identical([prompts[i] for i in order], ours, [wanted[i] for i in order], reference)


@pytest.mark.parametrize(
    ("speculative", "message"),
    [
        ({"method": "self_window", "draft_kv_window": 8}, "with which method 'self_window' does not work"),
        ({"method": "lookahead", "num_speculative_tokens": 12}, "with which method 'lookahead' does not work"),
        ({"method": "medusa", "model": "heads"}, "set draft_shape 'chain'"),
        ({"method": "draft_model", "draft_shape": "tree"}, "chains only"),
    ],
)
def test_what_does_not_follow_one_chain_is_refused(speculative: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = build("lfm2", tmp_path)
    given = {"num_speculative_tokens": 6, **speculative}
    if given["method"] == "draft_model":
        given["model"] = str(model)
    with pytest.raises(ConfigError, match=rf"lfm2'\) has recurrent layers.*{message}"):
        LLM(model=str(model), skip_tokenizer_init=True, enforce_eager=True, speculative_config=given)


def test_states_that_do_not_fit(tmp_path: Path) -> None:
    model = build("qwen3_next", tmp_path)
    with pytest.raises(ConfigError, match=r"the recurrent states of 4096 sequences take \d+ MiB \(.* KiB each\)"):
        LLM(model=str(model), skip_tokenizer_init=True, max_num_seqs=4096, kv_cache_memory_bytes=4 << 20)
