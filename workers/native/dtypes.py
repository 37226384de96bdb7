"""The dtypes of kernels."""

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.float8_e4m3fn: 4}
"""The number that stands for a dtype in arguments of kernels."""
