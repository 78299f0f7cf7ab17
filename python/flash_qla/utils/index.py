"""Tables of the chunks of packed sequences, and a cache for functions of such offsets."""

from __future__ import annotations

import functools
from typing import Any, Callable, List, NamedTuple, Tuple

import torch
from torch import Tensor

__all__ = ["prepare_chunk_indices", "prepare_chunk_offsets", "prepare_varlen_metadata", "tensor_cache"]

# Results that tensor_cache() keeps, beside those of graph captures.
_KEPT_RESULTS = 4

# Types of arguments that are compared by value; all others by identity.
_VALUES = (int, float, bool, str, bytes)


class _Entry(NamedTuple):
    args: tuple
    kwargs: dict
    result: Any


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _VALUES) and a == b)


def _of_this_call(entry: _Entry, args: tuple, kwargs: dict) -> bool:
    if len(entry.args) != len(args) or entry.kwargs.keys() != kwargs.keys():
        return False
    return all(map(_same, entry.args, args)) and all(_same(entry.kwargs[name], x) for name, x in kwargs.items())


def tensor_cache(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with its last four results kept. Tensors are told by identity, numbers and strings by value: a tensor that
    was changed in place counts as the same.

    While a CUDA graph is captured, results must be there already (AssertionError otherwise), and one that is used is
    kept for ever: the graph reads its memory.
    """
    recent: List[_Entry] = []  # the one used last at the end
    captured: List[_Entry] = []

    @functools.wraps(fn)
    def cached(*args: Any, **kwargs: Any) -> Any:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        for entry in captured:
            if _of_this_call(entry, args, kwargs):
                return entry.result
        for i, entry in enumerate(recent):
            if _of_this_call(entry, args, kwargs):
                (captured if capturing else recent).append(recent.pop(i))
                return entry.result
        if capturing:
            raise AssertionError(
                f"{fn.__name__}: arguments must be those of an earlier call while a CUDA graph is captured"
            )
        entry = _Entry(args, kwargs, fn(*args, **kwargs))
        recent.append(entry)
        del recent[:-_KEPT_RESULTS]
        return entry.result

    return cached


def _chunks_per_sequence(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    return (cu_seqlens.diff() + (chunk_size - 1)).div(chunk_size, rounding_mode="floor")


def prepare_chunk_indices(cu_seqlens: Tensor, chunk_size: int) -> Tensor:
    """[chunks, 2], dtype and device of cu_seqlens: for each chunk of packed sequences its sequence, as a position in
    cu_seqlens [N + 1] (empty sequences count), and its number in there. Waits for the device."""
    counts = _chunks_per_sequence(cu_seqlens, chunk_size)
    sequences = torch.arange(len(counts), device=cu_seqlens.device).repeat_interleave(counts)
    first = (counts.cumsum(0) - counts)[sequences]
    within = torch.arange(len(sequences), device=cu_seqlens.device) - first
    return torch.stack((sequences, within), 1).to(cu_seqlens.dtype)


def prepare_chunk_offsets(cu_seqlens: Tensor, chunk_size: int) -> Tuple[Tensor, int]:
    """([N + 1] of cu_seqlens' dtype: chunks before each sequence and in all; that last number). Waits for the
    device."""
    counts = _chunks_per_sequence(cu_seqlens, chunk_size)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(cu_seqlens.dtype)
    return offsets, int(offsets[-1])


def prepare_varlen_metadata(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor) -> Tensor:
    """cu_seqlens as it is: other implementations hang tables of chunks on it, this one plans on the device."""
    return cu_seqlens
