"""Two small learned proposers: one drafts from the newest hidden state, one reads all states into a cache.

Every draft is recorded, so that tests can recompute it with `transformers` alone.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from protos.config.engine import SpeculativeConfig
from protos.draft import Draft, DraftRow
from protos.draft_module import DraftRunner, DraftWeights
from protos.layers import FeatureSpec, LayerShape
from workers.draft.worker import DraftWorker

METHODS = {
    "test_last": "tests.support.models.tiny_heads:LastProposer",
    "test_all": "tests.support.models.tiny_heads:AllProposer",
}
TAPPED = (1, 3)


@dataclass(frozen=True)
class Note:
    """A draft and its inputs."""

    tokens: tuple[int, ...]
    first: int  # the first entry in the cache
    temperature: float
    draft: tuple[int, ...]


NOTES: list[Note] = []


def fit(target: Path, folder: Path) -> Path:
    """Save a head that predicts the next state linearly from the last state and the token between."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    prompts = torch.randint(3, 90, (24, 4), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        ids_NT = model.generate(prompts, max_new_tokens=40, min_new_tokens=40, do_sample=False, pad_token_id=0)
        states_NTH = model(ids_NT, output_hidden_states=True).hidden_states[-1]
        seen = torch.cat((states_NTH[:, :-1], model.get_input_embeddings()(ids_NT[:, 1:])), -1).flatten(0, 1)
        matrix = torch.linalg.lstsq(seen, states_NTH[:, 1:].flatten(0, 1)).solution
    folder.mkdir()
    save_file({"head.matrix": matrix.contiguous()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "test_last"}))
    return folder


class Last(nn.Module):
    """A module without a cache."""

    layers: tuple[LayerShape, ...] = ()
    shift = 0

    def __init__(self, parts: DraftWeights) -> None:
        super().__init__()
        self.matrix = parts.tensors("head.")["matrix"].to(parts.device, parts.dtype)
        self.embed, self.head = parts.embedding(), parts.head()
        self.max_model_len, self.vocab_size = 1 << 20, int(parts.target_config["vocab_size"])

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        return features_TF

    def next_state(self, states_RH: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
        return torch.cat((states_RH, self.embed(tokens_R)), -1) @ self.matrix


class All(nn.Module):
    """A small model that adds the target's states to its embeddings: entry i has token i + 1."""

    shift = 1

    def __init__(self, parts: DraftWeights) -> None:
        super().__init__()
        config = parts.config
        self.model = (
            AutoModelForCausalLM.from_pretrained(parts.folder, dtype=parts.dtype, attn_implementation=parts.attention)
            .model.eval()
            .requires_grad_(False)
        )
        self.embed, self.head = parts.embedding(), parts.head()
        size = config["hidden_size"] // config["num_attention_heads"]
        self.layers = (LayerShape(config["num_key_value_heads"], size, size),) * config["num_hidden_layers"]
        self.max_model_len, self.vocab_size = 256, int(parts.target_config["vocab_size"])

    def take_in(self, features_TF: torch.Tensor) -> torch.Tensor:
        return taken_in(features_TF)

    def forward(self, tokens_1T: torch.Tensor, positions_1T: torch.Tensor, features_1TX: torch.Tensor) -> torch.Tensor:
        embeds = self.embed(tokens_1T) + features_1TX
        states: torch.Tensor = self.model(
            inputs_embeds=embeds, position_ids=positions_1T, use_cache=False
        ).last_hidden_state
        return states


def taken_in(features_TF: torch.Tensor) -> torch.Tensor:
    """Return the difference of two tapped states, scaled by 0.01."""
    low, high = features_TF.chunk(2, -1)
    return (high - low) * 0.01


class LastProposer:
    on_worker: ClassVar[bool] = True

    def __init__(self, runner: DraftRunner) -> None:
        self.runner = runner

    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        return FeatureSpec("last")

    @classmethod
    def build(cls, config: SpeculativeConfig, parts: DraftWeights) -> Any:
        return Last(parts)

    @classmethod
    def create(cls, config: SpeculativeConfig, runner: DraftRunner | None) -> Self:
        assert runner is not None
        return cls(runner)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        module: Last = self.runner.module
        state_RH, tokens_R = self.runner.features(rows), self.runner.newest(rows)
        columns = []
        for step in range(max(row.k for row in rows)):
            state_RH = module.next_state(state_RH, tokens_R)
            tokens_R = self.runner.sample(rows, module.head(state_RH), step)
            columns.append(tokens_R.tolist())
        return self.noted(rows, columns)

    def noted(self, rows: Sequence[DraftRow], columns: list[list[int]]) -> list[Draft]:
        worker = self.runner
        assert isinstance(worker, DraftWorker)
        drafts = [Draft(tuple(column[r] for column in columns[: row.k])) for r, row in enumerate(rows)]
        for row, draft in zip(rows, drafts, strict=True):
            tokens = worker.slots.tokens[row.slot, : worker.slots.known_len[row.slot]].tolist()
            NOTES.append(
                Note(
                    tuple(tokens),
                    int(worker.cache._from[row.slot]),
                    worker.slots.sampling[row.slot].temperature,
                    draft.tokens,
                )
            )
        return drafts


class AllProposer(LastProposer):
    @classmethod
    def features_of(cls, config: SpeculativeConfig, draft: Mapping[str, Any], target: Mapping[str, Any]) -> FeatureSpec:
        return FeatureSpec("all", TAPPED)

    @classmethod
    def build(cls, config: SpeculativeConfig, parts: DraftWeights) -> Any:
        return All(parts)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        states_RH = self.runner.catch_up(rows)
        columns: list[list[int]] = []
        tokens_R = self.runner.newest(rows)
        for step in range(max(row.k for row in rows)):
            if step:
                states_RH = self.runner.extend(rows, tokens_R, step - 1, recycled(states_RH))
            tokens_R = self.runner.sample(rows, self.runner.module.head(states_RH), step)
            columns.append(tokens_R.tolist())
        return self.noted(rows, columns)


def recycled(states_RH: torch.Tensor) -> torch.Tensor:
    """Return the input for a draft token that replaces the target's states."""
    return states_RH * 0.01


class Twin:
    """Recomputes drafts of greedy rows: the whole text at once, without caches, by `transformers` alone."""

    def __init__(self, target: Path, draft: Path) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self.draft = draft

    @cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.draft, dtype=torch.float32).model.eval()

    @torch.inference_mode()
    def last(self, note: Note) -> tuple[int, ...]:
        matrix = load_file(self.draft / "model.safetensors")["head.matrix"]
        state = self._states(note)[-1][0, -1]
        tokens = list(note.tokens)
        for _ in note.draft:
            state = torch.cat((state, self.target.get_input_embeddings().weight[tokens[-1]])) @ matrix
            tokens.append(int(self.target.lm_head(state).argmax()))
        return tuple(tokens[len(note.tokens) :])

    @torch.inference_mode()
    def all(self, note: Note) -> tuple[int, ...]:
        states = self._states(note)
        beside = taken_in(torch.cat([states[place][0] for place in TAPPED], -1))[note.first :]
        tokens = list(note.tokens)
        for _ in note.draft:
            embeds = self.target.get_input_embeddings()(torch.tensor(tokens[note.first + 1 :])) + beside
            positions = torch.arange(note.first, note.first + len(beside))[None]
            out = self.model(inputs_embeds=embeds[None], position_ids=positions).last_hidden_state[0]
            tokens.append(int(self.target.lm_head(out[-1]).argmax()))
            beside = torch.cat((beside, recycled(out[-1:])))
        return tuple(tokens[len(note.tokens) :])

    def _states(self, note: Note) -> Any:
        """Return the target's states of all tokens but the newest, which it has not computed yet."""
        captured: dict[int, torch.Tensor] = {}
        hooks = [
            self.target.model.layers[i].register_forward_pre_hook(
                lambda _m, inputs, i=i: captured.__setitem__(i, inputs[0])
            )
            for i in range(len(self.target.model.layers))
        ]
        hooks.append(
            self.target.model.layers[-1].register_forward_hook(
                lambda _m, _i, out: captured.__setitem__(len(self.target.model.layers), out)
            )
        )
        final = self.target.model(torch.tensor([note.tokens[:-1]]), use_cache=False).last_hidden_state
        for hook in hooks:
            hook.remove()
        return {**captured, -1: final}
