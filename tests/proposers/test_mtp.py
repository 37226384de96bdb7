"""MTP heads: what they draft equals transformers' own layers, with the published way into them and out, run anew."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from proposers.mtp import MtpProposer
from protos.draft import DraftRow
from tests.support.models import published
from tests.support.models.dense_runner import DenseRunner, FakeParts, Text
from tests.support.models.drafter_world import CONFIG, ROWS
from tests.support.models.published import Drafted, Weights, rms
from tests.support.models.synthetic import config_of, stored
from tests.support.models.synthetic_layers import with_mtp

GLUE = {
    "appended": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
}


class Written:
    """A target with heads in its checkpoint, and a model of transformers of which the heads are plain last layers."""

    def __init__(self, folder: Path, family: str, heads: int = 1, **options: Any) -> None:
        self.folder = with_mtp(family, folder / "target", heads=heads, **options)
        self.tensors, self.config = stored(self.folder), config_of(self.folder)
        self.first = self.config["num_hidden_layers"]
        self.style = "mimo" if family == "qwen2" else "appended"
        self.eps = self.config["rms_norm_eps"]
        self.model = self._longer(folder / "longer", heads)
        self.embedding = self.tensors["model.embed_tokens.weight"]
        self.head = self.tensors["lm_head.weight"]
        generator = torch.Generator().manual_seed(3)
        vocab, hidden = self.embedding.shape
        self.texts = [torch.randint(vocab, (count,), generator=generator).tolist() for count in (2, 7, 12)]
        self.features = [torch.randn(len(text) - 1, hidden, generator=generator) for text in self.texts]
        self.noise = -torch.log(-torch.log(torch.rand(len(self.texts), 6, vocab, generator=generator)))

    def _longer(self, folder: Path, heads: int) -> Any:
        folder.mkdir()
        config = {**self.config, "num_hidden_layers": self.first + heads, "layer_types": None}
        (folder / "config.json").write_text(json.dumps(config))
        renamed = {
            name.replace("model.mtp_layers.0.", f"model.layers.{self.first}."): tensor
            for name, tensor in self.tensors.items()
        }
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not report["missing_keys"]
        return model.eval()

    def glue(self, head: int) -> Weights:
        prefix = f"model.mtp_layers.{head}." if self.style == "mimo" else f"model.layers.{self.first + head}."
        embed, state, proj, norm = (self.tensors[f"{prefix}{name}.weight"] for name in GLUE[self.style])
        return {
            "embed": embed,
            "state": state,
            "proj": proj,
            "norm": norm,
            "tokens": self.tensors.get(f"{prefix}embed_tokens.weight", self.embedding),
            "head": self.tensors.get(f"{prefix}shared_head.head.weight", self.head),
        }

    def runner(self) -> DenseRunner:
        """Build the module from the target's checkpoint, and run it over the texts."""
        parts = FakeParts(self.tensors, self.config, self.config, self.embedding, self.head)
        texts = [Text(text, features) for text, features in zip(self.texts, self.features, strict=True)]
        return DenseRunner(MtpProposer.build(CONFIG, parts), texts, self.noise)

    def behind(self, slot: int, drafted: Drafted) -> torch.Tensor:
        """Return the logits after *drafted*: head k modulo n makes draft token k, from the states of head k - 1."""
        tokens, states, heads = self.texts[slot][1:] + drafted, self.features[slot], len(self.model.model.layers)
        for step in range(len(drafted) + 1):
            index = step % (heads - self.first)
            glue, count = self.glue(index), len(states)
            e = glue["tokens"][tokens[:count]]
            e[0] = 0.0
            both = [rms(e, glue["embed"], self.eps), rms(states, glue["state"], self.eps)]
            x = torch.cat(both if self.style == "appended" else both[::-1], -1) @ glue["proj"].T
            positions = torch.arange(count)[None]
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            rope = self.model.model.rotary_emb(x[None], positions)
            block = self.model.model.layers[self.first + index]
            out = block(x[None], attention_mask=mask, position_embeddings=rope)[0]
            normed = rms(out, glue["norm"], self.eps)
            states = torch.cat([states, normed[-1:]])  # as `deepseek_nextn.py` and `glm4_moe_nextn.py` of SGLang return
        return normed[-1] @ glue["head"].T

    @torch.inference_mode()
    def assert_chains(self, proposer: MtpProposer, rows: list[DraftRow], most: int = 64) -> None:
        for row, draft in zip(rows, proposer.propose(rows), strict=True):
            wanted = published.chain(
                lambda drafted, slot=row.slot: self.behind(slot, drafted), self.noise[row.slot], min(row.k, most)
            )
            assert list(draft.tokens) == wanted


@pytest.mark.parametrize("own_ends", [True, False])
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_heads_after_the_last_layer_draft_what_is_published(tmp_path: Path, family: str, own_ends: bool) -> None:
    made = Written(tmp_path, family, own_ends=own_ends)
    made.assert_chains(MtpProposer(made.runner(), 1, 5), ROWS)


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_heads_take_turns(tmp_path: Path, family: str) -> None:
    made = Written(tmp_path, family, heads=2)
    made.assert_chains(MtpProposer(made.runner(), 1, 5), ROWS)


QWEN: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "eos_token_id": 2,
}  # fmt: skip


def test_qwen3_next_shares_what_leads_into_its_layers_and_adds_one_to_norms() -> None:
    short = AutoConfig.for_model("qwen3_next", **{**QWEN, "num_hidden_layers": 1, "layer_types": ["full_attention"]})
    model = AutoModelForCausalLM.from_config(short, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(2)
    block, rope = model.model.layers[0], model.model.rotary_emb
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(0.0, 0.3, generator=generator)
    glue = {
        "fc": torch.randn(16, 32, generator=generator),
        "norm": torch.randn(16, generator=generator) * 0.1,
        "pre_fc_norm_embedding": torch.randn(16, generator=generator) * 0.1,
        "pre_fc_norm_hidden": torch.randn(16, generator=generator) * 0.1,
    }
    stored = {f"mtp.{name}.weight": weight for name, weight in glue.items()}
    stored |= {f"mtp.layers.0.{name}": weight.detach() for name, weight in block.state_dict().items()}
    embedding, head = torch.randn(40, 16, generator=generator), torch.randn(40, 16, generator=generator)
    config = {**QWEN, "model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}
    text, features = [3, 9, 4, 30, 7], torch.randn(4, 16, generator=generator)
    runner = DenseRunner(
        MtpProposer.build(CONFIG, FakeParts(stored, config, config, embedding, head)),
        [Text(text, features)],
        torch.zeros(1, 3, 40),
    )

    def behind(drafted: Drafted) -> torch.Tensor:
        tokens, states = text[1:] + drafted, features
        while True:
            count = len(states)
            x = (
                torch.cat(
                    [
                        rms(embedding[tokens[:count]], 1 + glue["pre_fc_norm_embedding"]),
                        rms(states, 1 + glue["pre_fc_norm_hidden"]),
                    ],
                    -1,
                )
                @ glue["fc"].T
            )
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            out = block(x[None], attention_mask=mask, position_embeddings=rope(x[None], torch.arange(count)[None]))[0]
            normed = rms(out, 1 + glue["norm"])
            if count == len(tokens):
                return normed[-1] @ head.T
            states = torch.cat([states, normed[-1:]])

    with torch.inference_mode():
        [draft] = MtpProposer(runner, 1, 3).propose([DraftRow(0, 3)])
        assert list(draft.tokens) == published.chain(behind, torch.zeros(3, 40), 3)


def test_heads_of_the_speculators_format_read_the_embedding_first_and_are_fed_back_normed() -> None:
    """As in `MTPDraftModel`: `input_proj` of normed embedding and state, a Qwen3 layer, the last norm; one layer."""
    options = {key: value for key, value in QWEN.items() if "expert" not in key and key != "moe_intermediate_size"}
    short = AutoConfig.for_model("qwen3", **{**options, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(short, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(4)
    block, rope = model.model.layers[0], model.model.rotary_emb
    with torch.no_grad():
        for weight in block.parameters():
            weight.normal_(0.0, 0.3, generator=generator)
    glue = {
        "input_proj": torch.randn(16, 32, generator=generator),
        **{f"{name}_layernorm": torch.randn(16, generator=generator) for name in ("token", "hidden", "final")},
    }
    stored = {f"mtp_layers.0.{name}.weight": weight for name, weight in glue.items()}
    stored |= {f"mtp_layers.0.{name}": weight.detach() for name, weight in block.state_dict().items()}
    embedding, head = torch.randn(40, 16, generator=generator), torch.randn(40, 16, generator=generator)
    target = {**options, "model_type": "qwen3"}
    draft = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": target}
    text, features = [3, 9, 4, 30, 7], torch.randn(4, 16, generator=generator)
    module = MtpProposer.build(CONFIG, FakeParts(stored, draft, target, embedding, head))

    def behind(drafted: Drafted) -> torch.Tensor:
        tokens, states = text[1:] + drafted, features
        while True:
            count = len(states)
            token = rms(embedding[tokens[:count]], glue["token_layernorm"])
            x = torch.cat([token, rms(states, glue["hidden_layernorm"])], -1) @ glue["input_proj"].T
            mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
            out = block(x[None], attention_mask=mask, position_embeddings=rope(x[None], torch.arange(count)[None]))[0]
            normed = rms(out, glue["final_layernorm"])
            if count == len(tokens):
                return normed[-1] @ head.T
            states = torch.cat([states, normed[-1:]])

    with torch.inference_mode():
        runner = DenseRunner(module, [Text(text, features)], torch.zeros(1, 3, 40))
        [draft_tokens] = MtpProposer(runner, 1, 3).propose([DraftRow(0, 3)])
        assert list(draft_tokens.tokens) == published.chain(behind, torch.zeros(3, 40), 3)


def test_mimo_reads_the_state_first_and_takes_one_step(tmp_path: Path) -> None:
    made = Written(tmp_path, "qwen2")
    runner = made.runner()
    assert runner.module.max_tokens == 1
    made.assert_chains(MtpProposer.create(CONFIG, runner), ROWS, most=1)
