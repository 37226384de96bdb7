"""Draft heads with noise on their weights."""

import torch

from demo.heads import Head


def shaken(head: Head) -> Head:
    """Add noise to every weight of *head*: zeros and ones hide mistakes."""
    for weight in head.parameters():
        weight.data.add_(torch.randn_like(weight) * 0.2)
    return head.eval()
