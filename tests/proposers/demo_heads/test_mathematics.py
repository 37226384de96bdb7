"""The heads of `demo.train --heads`: lessons, losses and forward passes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from demo import heads_eagle, heads_flat, losses
from demo.heads import Lesson, Teacher, _InSlices, anchors
from tests.support.models import published, tiny_models
from tests.support.models.shaken import shaken


def test_a_lesson_holds_what_the_target_computes(lesson: Lesson, teacher: Teacher) -> None:
    seen = teacher.model(input_ids=lesson.ids_BL, output_hidden_states=True)
    at = (1, lesson.anchors_BM[1, 3])
    assert torch.equal(lesson.tokens(2)[1, 3], lesson.ids_BL[1, at[1] + 2])
    assert torch.allclose(lesson.at_anchors_BMH[1, 3], seen.hidden_states[-1][at])
    assert torch.allclose(lesson.at(lesson.aux_BLF)[1, 3, 32:64], seen.hidden_states[1][at])
    assert torch.allclose(teacher.output(lesson.at_anchors_BMH), lesson.at(seen.logits), atol=1e-5)
    assert lesson.anchors_BM.max() <= 24 - 5 - 2
    assert torch.equal(lesson.anchors_BM, anchors(lesson.ids_BL, 7, 5))


def test_a_family_whose_head_is_something_else_is_refused(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_models.build("gemma2", tmp_path))
    Teacher(model)
    model.lm_head.register_forward_hook(lambda *seen: seen[-1] * 2)
    teacher = Teacher(model)
    teacher.output_layer = torch.nn.Linear(32, 96)
    with pytest.raises(ValueError, match="gemma2"):
        teacher._check()


def test_a_loss_in_slices_is_the_loss_and_has_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("demo.heads.ROWS_AT_ONCE", 3)
    states, weight = torch.randn(7, 5, requires_grad=True), torch.nn.Parameter(torch.randn(11, 5))
    wanted = torch.randn(7, 11)

    def score(states: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        return losses.divergence(states @ weight.T, wanted)

    found, expected = _InSlices.apply(score, states, wanted, weight) * 2, score(states, wanted) * 2
    assert torch.allclose(found, expected)
    slopes, plain = (torch.autograd.grad(loss, (states, weight)) for loss in (found, expected))
    assert all(torch.allclose(mine, other, atol=1e-6) for mine, other in zip(slopes, plain, strict=True))


def dense_layer(
    weights: dict[str, torch.Tensor], prefix: str, x_TW: torch.Tensor, residual_TH: torch.Tensor, config: Any
) -> torch.Tensor:
    """Run one layer over whole sequences; return the state after the last entry."""
    sees = published.causal(len(x_TW))
    attended = published.attention(
        weights,
        f"{prefix}.self_attn",
        x_TW,
        list(range(len(x_TW))),
        sees,
        head_dim=config.head_dim,
        theta=config.rope_parameters["rope_theta"],
    )
    state = residual_TH + attended
    normed = published.rms(state, weights[f"{prefix}.post_attention_layernorm.weight"])
    return (state + published.mlp(weights, f"{prefix}.mlp", normed))[-1]


def eagle1_entry(weights: dict[str, torch.Tensor], embedded: torch.Tensor, state: torch.Tensor) -> Any:
    mixed = published.linear(weights, "fc", torch.cat([embedded, state], -1))
    return mixed, mixed


def eagle3_entry(weights: dict[str, torch.Tensor], embedded: torch.Tensor, state: torch.Tensor) -> Any:
    normed = (
        published.rms(embedded, weights["midlayer.input_layernorm.weight"]),
        published.rms(state, weights["midlayer.hidden_norm.weight"]),
    )
    return torch.cat(normed, -1), state


@pytest.mark.parametrize(
    ("make", "entry", "prefix"),
    [
        (heads_eagle.Eagle1, eagle1_entry, "layers.0"),
        (heads_eagle.Eagle3, eagle3_entry, "midlayer"),
    ],
)
def test_chains_after_anchors_are_what_a_draft_computes_one_step_after_another(
    make: Any, entry: Any, prefix: str, teacher: Teacher, lesson: Lesson
) -> None:
    """Entries of the target's states up to the anchor, then of the chain's own, in an ordinary causal layer."""
    head: heads_eagle.Eagle = shaken(make(teacher, depth=3))  # type: ignore[assignment]
    weights = dict(head.state_dict())
    outs = head.chain(lesson, lesson.true_tokens)
    for row, place in ((0, 2), (1, 6)):
        anchor = int(lesson.anchors_BM[row, place])
        known = lesson.states_BLH[row] if prefix != "midlayer" else published.linear(weights, "fc", lesson.aux_BLF[row])
        states = list(known[: anchor + 1])
        for out in outs:
            tokens = lesson.ids_BL[row, 1 : len(states) + 1]
            x, residual = entry(weights, lesson.embedded(tokens), torch.stack(states))
            states.append(dense_layer(weights, prefix, x, residual, teacher.config))
            assert torch.allclose(out[row, place], states[-1], atol=1e-4)


def test_flat_heads_compute_what_was_published(teacher: Teacher, lesson: Lesson) -> None:
    """Hydra's second head, the MLP speculator's third draft token, ReDrafter's second: by their formulas."""
    hydra, mlp, recurrent = (
        shaken(make(teacher, depth=3))
        for make in (  # type: ignore[arg-type]
            heads_flat.HydraHeads,
            heads_flat.MlpSpeculator,
            heads_flat.RecurrentHeads,
        )
    )
    state, one, two = (lesson.at_anchors_BMH, *(lesson.embedded(lesson.tokens(i)) for i in (1, 2)))
    weights = hydra.state_dict()
    read = torch.cat([state, one, two], -1)
    gate = published.linear(weights, "hydra_mlp.1.0.linear", read)
    wanted = published.linear(weights, "hydra_mlp.1.0.res_connection", read) + gate * gate.sigmoid()
    assert torch.allclose(hydra.states(lesson, lesson.true_tokens)[1], wanted, atol=1e-5)

    weights, inner = mlp.state_dict(), 8
    state_weight = 0.5 ** (0.5 / 3)
    token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
    s = published.rms(state, torch.ones(32)) / 2**0.5
    for i in range(3):
        embedded = weights["speculator.emb.0.weight"][lesson.tokens(1 + i)]
        s = published.linear(weights, f"speculator.proj.{min(i, 1)}", s) * state_weight + embedded * token_weight
        s = published.rms(s, weights["speculator.ln.0.weight"]) + weights["speculator.ln.0.bias"]
        s = torch.nn.functional.gelu(s)
    assert torch.allclose(mlp.states(lesson, lesson.true_tokens)[2], s, atol=1e-5)

    weights, s = recurrent.state_dict(), torch.zeros_like(state)
    for embedded in (one, two):
        s = published.linear(weights, "rnn_w", embedded) + published.linear(weights, "rnn_u", s)
        s = s * s.sigmoid()
    x = published.linear(weights, "input_proj", torch.cat([state, s], -1))
    x = x + torch.nn.functional.silu(published.linear(weights, "lm_head.0.linear", x))
    assert torch.allclose(recurrent.states(lesson, lesson.true_tokens)[1], x, atol=1e-5)
    assert torch.allclose(recurrent.logits(lesson, 1, x), published.linear(weights, "lm_head.1", x), atol=1e-5)
