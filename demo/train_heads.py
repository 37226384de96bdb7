"""Train heads for a target, all together: the target computes each text once for all heads."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import corpus, own_text
from demo.evaluate import agreement, continuations
from demo.heads import Head, Teacher, anchors
from demo.heads_eagle import Eagle1, Eagle3, most_frequent
from demo.heads_flat import HydraHeads, MedusaHeads, MlpSpeculator, RecurrentHeads
from demo.losses import Loss
from demo.trainer import Trainer, TrainingRun, adamw, device, encode

ANCHORS_PER_TEXT = 128
MAKERS: Mapping[str, Callable[[Teacher, torch.Tensor], Head]] = {
    "medusa": lambda teacher, _: MedusaHeads(teacher),
    "hydra": lambda teacher, _: HydraHeads(teacher),
    "mlp_speculator": lambda teacher, _: MlpSpeculator(teacher),
    "recurrent": lambda teacher, _: RecurrentHeads(teacher),
    "eagle": lambda teacher, _: Eagle1(teacher),
    "eagle3": lambda teacher, ids_N: Eagle3(teacher, frequent=most_frequent(ids_N, teacher.config.vocab_size)),
}


@dataclass(frozen=True)
class Material:
    """What heads are trained on: the texts below the folder *text*, and *own_texts* texts that the target generates."""

    text: Path
    own_texts: int

    def purpose(self, what: str, target: Path, start: Path | None) -> str:
        """Say that *what* is trained for *target* on this material, from the weights in *start*."""
        begun = f" from {start.resolve()}" if start is not None else ""
        return f"{what} for {target.resolve()} on {self.text.resolve()}{begun}"


def train_heads(
    target_folder: Path,
    methods: Sequence[str],
    material: Material,
    work: Path,
    run: TrainingRun,
    *,
    out: Path,
    start: Path | None = None,
) -> dict[str, list[float]]:
    """Train one head of each of *methods*, and write it into the folder *out* / method in its public format.

    They start from the heads in the folder *start* / method, or from random weights.
    Returns, for each, `evaluate.agreement` on held-out texts.
    """
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).to(device())
    _, heldout = corpus.split(material.text)
    stream = encode(corpus.training_texts(material.text), tokenizer)
    texts = list(streams(stream, target_folder, material, work))
    torch.manual_seed(run.seed)
    teacher = Teacher(model)
    heads = {method: MAKERS[method](teacher, torch.cat(texts)) for method in methods}
    if start is not None:
        heads = {method: read(head, start / method).train() for method, head in heads.items()}
    trained = nn.ModuleDict(heads).to(device())
    state = work / f"heads-{'-'.join(sorted(methods))}.pt"
    run = replace(run, purpose=material.purpose("heads", target_folder, start))
    Trainer(trained, texts, run, state, optimized_by=_one_each).train(joint_loss(teacher, heads), "heads")
    for method, head in heads.items():
        write(head.eval(), teacher.config, out / method)
    texts_BL = continuations(teacher, encode(list(corpus.read(heldout)), tokenizer))
    return {method: agreement(teacher, head, texts_BL) for method, head in heads.items()}


def streams(stream: torch.Tensor, target_folder: Path, material: Material, work: Path) -> Iterator[torch.Tensor]:
    """Yield *stream*, the ids `[N]` of the material's texts, and the ids of those that the target generates."""
    yield stream
    if material.own_texts:
        path, purpose = work / "own_text.safetensors", material.purpose("texts to train on", target_folder, None)
        yield own_text.load_or_write(target_folder, stream, path, material.own_texts, purpose)


def joint_loss(teacher: Teacher, heads: Mapping[str, Head]) -> Loss:
    """Return the sum of the heads' losses over ids `[B, L]`."""
    depth = max(head.depth for head in heads.values())

    def loss(ids_BL: torch.Tensor) -> torch.Tensor:
        lesson = teacher.teach(ids_BL, anchors(ids_BL, ANCHORS_PER_TEXT, depth))
        return torch.stack([head.loss(lesson) for head in heads.values()]).sum()

    return loss


def write(head: Head, target: Any, folder: Path) -> None:
    """Write *head*, trained for a target with the config *target*, in the public format of its method, in bf16."""
    folder.mkdir(parents=True, exist_ok=True)
    described = head.describe(target) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    stored = {name: _as_stored(tensor) for name, tensor in head.state_dict().items()}
    path = folder / head.file_name
    if path.suffix == ".pt":
        torch.save(stored, path)
    else:
        save_file(stored, path, metadata={"format": "pt"})


def read(head: Head, folder: Path) -> Head:
    """Fill *head* with what `write` wrote into *folder*, and return it.

    Raises:
        RuntimeError: names or shapes differ.
    """
    path = folder / head.file_name
    stored = torch.load(path, weights_only=True) if path.suffix == ".pt" else load_file(path)
    head.load_state_dict(stored)
    return head.eval()


def _one_each(heads: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return an optimizer for each head. For so short a training, AdamW is enough."""
    return [adamw(head.parameters(), rate) for head in heads.children()]


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    kept = tensor.detach().cpu()
    return (kept.bfloat16() if kept.is_floating_point() else kept).contiguous()
