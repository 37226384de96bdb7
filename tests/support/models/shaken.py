"""Draft heads whose every weight matters."""

import torch

from demo.heads import Head


def shaken(head: Head) -> Head:
    """Return *head* with noise on every weight: what begins as zeros or ones hides mistakes."""
    for weight in head.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.2)
    return head.eval()
