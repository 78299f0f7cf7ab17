"""Helpers that callers of the public package `flash_qla` import: packing, L2 norm, chunk tables, decorators.

Plain PyTorch on any device; nothing is compiled at run time, and the operations of this package use none of it.
"""

from .contiguous import input_guard
from .index import prepare_chunk_indices, prepare_chunk_offsets, tensor_cache
from .math import l2norm, l2norm_bwd, l2norm_fwd
from .pack import fill_last_chunk_of_g, pack, pad_and_reshape, unpack

__all__ = [
    "fill_last_chunk_of_g",
    "input_guard",
    "l2norm",
    "l2norm_bwd",
    "l2norm_fwd",
    "pack",
    "pad_and_reshape",
    "prepare_chunk_indices",
    "prepare_chunk_offsets",
    "tensor_cache",
    "unpack",
]
