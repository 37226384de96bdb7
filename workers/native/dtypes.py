"""The dtypes of kernels."""

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The number that stands for a dtype in arguments of kernels."""
