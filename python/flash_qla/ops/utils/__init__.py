"""Small operations that callers of the public package `flash_qla` import. Plain PyTorch, on any device."""

from .cumsum import chunk_local_cumsum
from .group_reduce import group_reduce_vector

__all__ = ["chunk_local_cumsum", "group_reduce_vector"]
