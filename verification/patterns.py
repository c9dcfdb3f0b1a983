"""Tensors whose values identify them."""

import torch

BIG = 100_000  # elements of int64: well above the size of a tensor that is sent inline


def pattern(seed: int, count: int) -> torch.Tensor:
    """Return a tensor of int64 that differs in every element from the pattern of another seed."""
    return torch.arange(count, dtype=torch.int64) * 31 + seed
