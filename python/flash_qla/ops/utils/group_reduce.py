"""Sums over the value heads of a key head."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["group_reduce_vector"]


def group_reduce_vector(buffer: Tensor, Hg: int) -> Tensor:
    """[B, T, Hg, K] from a buffer [B, T, H, K]: sums of H / Hg neighbouring heads, in float32 (float64 for float64),
    dtype of buffer. ValueError where Hg does not divide H."""
    heads = buffer.shape[2]
    if Hg < 1 or heads % Hg:
        raise ValueError(f"group_reduce_vector: buffer.shape[2] ({heads}) must be a multiple of Hg ({Hg})")
    accumulator = torch.float64 if buffer.dtype == torch.float64 else torch.float32
    return buffer.unflatten(2, (Hg, heads // Hg)).sum(3, dtype=accumulator).to(buffer.dtype)
