"""Draft heads as published, one step at a time over raw tensors: slow, plain, independent of the implementation."""

from collections.abc import Callable

import torch

Weights = dict[str, torch.Tensor]


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def rotate(x_THD: torch.Tensor, positions: list[int], theta: float) -> torch.Tensor:
    """Apply rotary embeddings to halves, as Llama does."""
    half = x_THD.shape[-1] // 2
    angle = torch.tensor([[[position / theta ** (i / half) for i in range(half)]] for position in positions])
    a, b = x_THD[..., :half], x_THD[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def causal(count: int) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril()


def attend(
    query_THD: torch.Tensor,
    key_LGD: torch.Tensor,
    value_LGE: torch.Tensor,
    sees_TL: torch.Tensor,
) -> torch.Tensor:
    """Compute attention one head at a time; return `[T, heads * E]`."""
    heads, groups = query_THD.shape[1], key_LGD.shape[1]
    outputs = []
    for h in range(heads):
        g = h * groups // heads
        scores = query_THD[:, h] @ key_LGD[:, g].T / query_THD.shape[-1] ** 0.5
        outputs.append(torch.where(sees_TL, scores, -torch.inf).softmax(-1) @ value_LGE[:, g])
    return torch.cat(outputs, -1)


def mlp(weights: Weights, prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = linear(weights, f"{prefix}.gate_proj", x), linear(weights, f"{prefix}.up_proj", x)
    return linear(weights, f"{prefix}.down_proj", gate * torch.sigmoid(gate) * up)


def attention(
    weights: Weights,
    prefix: str,
    x_TW: torch.Tensor,
    positions: list[int],
    sees_TL: torch.Tensor,
    *,
    head_dim: int,
    theta: float,
) -> torch.Tensor:
    """Llama's attention, with query and key norms if there are any (Qwen3)."""

    def project(name: str, norm: str = "") -> torch.Tensor:
        y = linear(weights, f"{prefix}.{name}", x_TW).view(len(x_TW), -1, head_dim)
        weight = weights.get(f"{prefix}.{norm}.weight")
        return y if weight is None else rms(y, weight)

    query = rotate(project("q_proj", "q_norm"), positions, theta)
    key = rotate(project("k_proj", "k_norm"), positions, theta)
    return linear(weights, f"{prefix}.o_proj", attend(query, key, project("v_proj"), sees_TL))


Drafted = list[int]


def chain(logits_behind: Callable[[Drafted], torch.Tensor], noise_KV: torch.Tensor, k: int) -> Drafted:
    """Draft k tokens, each from the logits after the previous ones."""
    drafted: Drafted = []
    for step in range(k):
        drafted.append(int((logits_behind(drafted).log_softmax(-1) + noise_KV[step]).argmax()))
    return drafted


def dynamic_tree(
    logits_behind: Callable[[Drafted], torch.Tensor], noise_KV: torch.Tensor, *, k: int, width: int, depth: int
) -> set[tuple[int, ...]]:
    """Return EAGLE-2's tree as the set of its paths; at each level the *width* best nodes get children."""
    depth = min(depth, k)
    scores: dict[tuple[int, ...], float] = {}
    frontier: list[tuple[int, ...]] = [()]
    for level in range(depth):
        children: dict[tuple[int, ...], float] = {}
        for path in frontier:
            log_q = logits_behind(list(path)).log_softmax(-1)
            for token in (log_q + noise_KV[level]).topk(width).indices.tolist():
                children[(*path, token)] = scores.get(path, 0.0) + float(log_q[token])
        scores |= children
        frontier = sorted(children, key=lambda path: -children[path])[:width]
    return set(sorted(scores, key=lambda path: -scores[path])[:k])


def paths(tokens: tuple[int, ...], parents: tuple[int, ...]) -> set[tuple[int, ...]]:
    """Return the paths of a draft tree from its root to each node."""
    found: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return set(found)
