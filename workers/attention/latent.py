"""Multi-head latent attention over the latents themselves (DeepSeek-V2, section 2.1.2).

The attention modules of `transformers` expand each token's latent to keys and values of all heads. Here the half of the
expansion that makes keys is applied to queries, and the half that makes values to what attention returns: products may
be taken in any order. So a token's K is its latent with the rotary key that its heads share, its V is the latent, and
all heads read one K/V head. DeepSeek-V3 caches 576 numbers a token and layer instead of 40,960.
"""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import nn

from protos.layers import LayerShape
from workers.attention.backend import NAME


class Latents:
    """The expansion of one attention module, in place of its `expand_kv`.

    The module expands by its own code wherever its attention is not ours, as in the check of a loaded model.

    Args:
        attention: a module with `expand_kv`; of several ranks, with this one's heads.

    Attributes:
        shape: of the cached K and V.
    """

    def __init__(self, attention: Any) -> None:
        self._attention, self._expand = attention, attention.expand_kv
        latent = attention.kv_lora_rank
        self.shape = LayerShape(1, latent + attention.qk_rope_head_dim, latent, values_in_keys=True)
        sizes = [attention.qk_nope_head_dim, attention.v_head_dim]
        weight_HXL = _expansion(attention).view(-1, sum(sizes), latent)
        self._keys_HDL, self._values_HEL = torch.split(weight_HXL, sizes, 1)

    def __call__(self, latent_11TL: torch.Tensor, rotary_11TR: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V: `[1, 1, T, L + R]`, and of these the first L."""
        if self._attention.config._attn_implementation != NAME:
            return self._expand(latent_11TL, rotary_11TR)  # type: ignore[no-any-return]
        key_11TK = torch.cat((latent_11TL, rotary_11TR), -1)
        return key_11TK, key_11TK[..., : latent_11TL.shape[-1]]

    def queries(self, query_1HTD: torch.Tensor) -> torch.Tensor:
        """Return queries of latents, `[1, H, T, L + R]`; the last R numbers of the given ones are rotary."""
        size = self._keys_HDL.shape[1]
        return torch.cat((query_1HTD[..., :size] @ self._keys_HDL, query_1HTD[..., size:]), -1)

    def outputs(self, output_1THL: torch.Tensor) -> torch.Tensor:
        """Return what attention over values returns, `[1, T, H, E]`, from what it returned over latents."""
        output_1HTE: torch.Tensor = output_1THL.transpose(1, 2) @ self._values_HEL.transpose(1, 2)
        return output_1HTE.transpose(1, 2).contiguous()


def attend_over_latents(model: nn.Module, device: torch.device) -> None:
    """Have the attention modules of *model* that have latents attend over them; change nothing on a CPU.

    Call it when weights are on their device.
    """
    modules: list[Any] = list(model.modules()) if device.type == "cuda" else []
    for module in modules:
        if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj"):
            module.expand_kv = module.absorbed = Latents(module)


def with_latents(model: nn.Module, shapes: Seq[LayerShape]) -> tuple[LayerShape, ...]:
    """Return the *shapes* of K and V of every layer of *model*, with those of latents where it attends over these."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "absorbed")]
    found = {module.layer_idx: module.absorbed.shape for module in modules}
    return tuple(found.get(layer, shape) for layer, shape in enumerate(shapes))


def _expansion(attention: Any) -> torch.Tensor:
    """Return the weight of the expansion, `[outputs, latent]`.

    A quantised one is replaced by a layer with the values that it stands for: it would be held beside them.
    """
    if not isinstance(attention.kv_b_proj, nn.Linear):
        attention.kv_b_proj = _dequantised(attention)
    weight: torch.Tensor = attention.kv_b_proj.weight
    return weight


@torch.inference_mode()
def _dequantised(attention: Any) -> nn.Linear:
    norm: torch.Tensor = attention.kv_a_layernorm.weight
    unit_LL = torch.eye(attention.kv_lora_rank, dtype=norm.dtype, device=norm.device)
    weight_LX: torch.Tensor = attention.kv_b_proj.forward(unit_LL)
    latent, outputs = weight_LX.shape
    layer = nn.Linear(latent, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight_LX.T.contiguous(), requires_grad=False)
    return layer
