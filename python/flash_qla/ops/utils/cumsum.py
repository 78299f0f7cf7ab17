"""Sums of a gate within chunks."""

from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ...utils.pack import pad_and_reshape

__all__ = ["chunk_local_cumsum"]


def chunk_local_cumsum(
    g: Tensor,
    chunk_size: int = 64,
    cu_seqlens: Optional[Tensor] = None,
    reverse: bool = False,
    zero_last_chunk: bool = False,
) -> Tensor:
    """Sums of g from each chunk's first token on, or to its last one. Nothing is clamped; the device is not read.

    Args:
        g: [B, T, H] float.
        chunk_size: tokens of a chunk.
        cu_seqlens: [N + 1] offsets of sequences packed in B = 1; each begins with a chunk of its own.
        reverse: row t has the sum from t to the end of its chunk.
        zero_last_chunk: accepted, no effect: rows after the last offset are zero with and without it.

    Returns:
        [B, T, H], dtype of g; summed in float32 (float64 for float64).

    Raises:
        ValueError: g is not [B, T, H], or cu_seqlens goes with B other than 1.
    """
    if g.ndim != 3:
        raise ValueError(f"chunk_local_cumsum: g.shape {tuple(g.shape)} must be [B, T, H]")
    wide = g if g.dtype == torch.float64 else g.float()
    if cu_seqlens is None:
        chunks = pad_and_reshape(wide, 1, chunk_size)
        return _sums(chunks, reverse).flatten(1, 2)[:, : g.shape[1]].to(g.dtype)
    if g.shape[0] != 1:
        raise ValueError(f"chunk_local_cumsum: g.shape[0] ({g.shape[0]}) must be 1 with cu_seqlens")

    # Each token's place in a table of chunks that is large enough for every set of lengths: no length is read.
    tokens, sequences = g.shape[1], len(cu_seqlens) - 1
    token = torch.arange(tokens, device=g.device)
    offsets = cu_seqlens.long()
    sequence = torch.searchsorted(offsets, token, right=True) - 1
    counts = (offsets.diff() + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")
    first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    # Tokens after the last offset are put where nothing else is, one "sequence" more.
    position = token - offsets[sequence]
    chunk = first[sequence] + position.div(chunk_size, rounding_mode="floor")
    table = wide.new_zeros(tokens // chunk_size + sequences + 1, chunk_size, g.shape[2])
    table[chunk, position % chunk_size] = wide[0]
    sums = _sums(table.unsqueeze(0), reverse)[0][chunk, position % chunk_size]
    return sums.masked_fill((sequence == sequences).unsqueeze(-1), 0.0).to(g.dtype).unsqueeze(0)


def _sums(chunks: Tensor, reverse: bool) -> Tensor:
    """Cumsums of [B, chunks, tokens, H] over the tokens."""
    return chunks.flip(2).cumsum(2).flip(2) if reverse else chunks.cumsum(2)
