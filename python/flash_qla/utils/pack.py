"""From padded batches to packed sequences and back, and from tokens to chunks."""

from __future__ import annotations

from typing import List, Optional

import torch
from torch import Tensor

__all__ = ["fill_last_chunk_of_g", "pack", "pad_and_reshape", "unpack"]


def _lengths(operation: str, cu_seqlens: Tensor) -> List[int]:
    """Lengths of the packed sequences, read from their device."""
    if cu_seqlens.ndim != 1 or len(cu_seqlens) == 0:
        raise ValueError(f"{operation}: cu_seqlens.shape {tuple(cu_seqlens.shape)} must be [N + 1]")
    offsets = cu_seqlens.tolist()
    lengths = [end - begin for begin, end in zip(offsets, offsets[1:])]
    if offsets[0] != 0 or any(length < 0 for length in lengths):
        raise ValueError(f"{operation}: cu_seqlens ({offsets}) must begin with 0 and must not fall")
    return lengths


def pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The first cu_seqlens[i + 1] - cu_seqlens[i] rows of each x[i], one after another. Waits for cu_seqlens' device.

    Args:
        x: [N, L, ..].
        cu_seqlens: [N + 1] integers from 0, never falling by more than L.

    Returns:
        [1, cu_seqlens[N], ..], dtype of x.

    Raises:
        ValueError: cu_seqlens does not fit x.
    """
    lengths = _lengths("pack", cu_seqlens)
    if len(lengths) > x.shape[0]:
        most = x.shape[0] + 1
        raise ValueError(f"pack: cu_seqlens.shape[0] ({len(cu_seqlens)}) must be x.shape[0] + 1 ({most}) at most")
    if lengths and max(lengths) > x.shape[1]:
        longest = f"the longest sequence of cu_seqlens ({max(lengths)})"
        raise ValueError(f"pack: {longest} must not be above x.shape[1] ({x.shape[1]})")
    rows = [sequence[:length] for sequence, length in zip(x, lengths)]
    return torch.cat(rows).unsqueeze(0) if rows else x.new_empty(1, 0, *x.shape[2:])


def unpack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Packed sequences as rows of a batch, zeros behind each. Reads cu_seqlens from its device.

    Args:
        x: [1, T, ..].
        cu_seqlens: [N + 1] integers from 0, never falling, up to T.

    Returns:
        [N, longest sequence, ..], dtype of x.

    Raises:
        ValueError: cu_seqlens does not fit x.
    """
    lengths = _lengths("unpack", cu_seqlens)
    if x.shape[0] != 1:
        raise ValueError(f"unpack: x.shape[0] ({x.shape[0]}) must be 1")
    if sum(lengths) > x.shape[1]:
        raise ValueError(f"unpack: the last of cu_seqlens ({sum(lengths)}) must not be above x.shape[1] ({x.shape[1]})")
    if not lengths:
        return x.new_zeros(0, 0, *x.shape[2:])
    sequences = x[0, : sum(lengths)].split(lengths)
    return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)


def pad_and_reshape(x: Tensor, dim: int, chunk_size: int = 64) -> Tensor:
    """x with zeros behind dimension `dim` up to a multiple of chunk_size, and that dimension as two: (-1,
    chunk_size)."""
    dim %= x.ndim
    missing = -x.shape[dim] % chunk_size
    padded = torch.nn.functional.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing))
    return padded.unflatten(dim, (padded.shape[dim] // chunk_size, chunk_size))


def fill_last_chunk_of_g(
    g: Tensor, num_tokens: int, cu_seqlens: Optional[Tensor], chunk_size: int = 64, reverse: bool = False
) -> Tensor:
    """Carries a decay's cumsum to the end of each sequence's last chunk where tokens fill only a part of it. In place.

    Args:
        g: [N, chunks, chunk_size, H].
        num_tokens: length of all sequences, without cu_seqlens.
        cu_seqlens: [N + 1] offsets, read from their device, or None.
        reverse: the way back, for its gradient: the chunk's last value is added to that of the last token.

    Returns:
        g.
    """
    lengths = [num_tokens] * g.shape[0] if cu_seqlens is None else _lengths("fill_last_chunk_of_g", cu_seqlens)
    for sequence, length in zip(g, lengths):
        full, valid = divmod(length, chunk_size)
        if valid == 0:
            continue
        if reverse:
            sequence[full, valid - 1] += sequence[full, chunk_size - 1]
        else:
            sequence[full, valid:] = sequence[full, valid - 1]
    return g
