"""Maps of a draft's ids to the target's: offsets (`d2t`), masks (`t2d`) and plain lists, checked and merged."""

import torch

from proposers.formats.shared.layout import refuse


def checked_ids(title: str, name: str, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return *ids* as int64 `[Vd]`; raises `ModelError` if they are not distinct ids below *vocab_size*."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        refuse(title, f"{name} should hold whole numbers, but holds {str(ids.dtype).removeprefix('torch.')}")
    ids_V = ids.reshape(-1).to(torch.int64)
    wrong = (ids_V < 0) | (ids_V >= vocab_size)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        refuse(title, f"{name} makes draft id {at} the target's {int(ids_V[at])}, outside of its {vocab_size} ids")
    different = len(set(ids_V.tolist()))
    if different != ids_V.numel():
        refuse(title, f"{name} maps {ids_V.numel()} draft ids to {different} different ones of the target")
    return ids_V


def target_ids(title: str, d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """Return the target's id of every draft id, int64 `[Vd]`.

    Args:
        title: the checkpoint's name in messages.
        d2t: offsets `[Vd]`: the target's id is the draft's plus this.
        t2d: whether the draft has an id of the target `[V]`, if the checkpoint has this map.
        vocab_size: V.

    Raises:
        ModelError: ids are invalid or repeated, or the two maps disagree.
    """
    offsets = d2t.reshape(-1)
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        refuse(title, f"d2t should hold whole numbers, but holds {str(d2t.dtype).removeprefix('torch.')}")
    ids_V = checked_ids(title, "d2t", offsets.to(torch.int64) + torch.arange(offsets.numel()), vocab_size)
    if t2d is not None:
        known = t2d.reshape(-1).to(torch.bool)
        if int(known.sum()) != ids_V.numel():
            refuse(title, f"t2d marks {int(known.sum())} ids of the target, but the draft has {ids_V.numel()}")
        if not bool(known[ids_V].all()):
            first = int(ids_V[~known[ids_V]][0])
            refuse(title, f"d2t maps to the target's id {first}, which t2d does not mark")
    return ids_V
