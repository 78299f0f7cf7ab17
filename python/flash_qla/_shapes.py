"""Shapes and dtypes of results. Malformed inputs give shapes of zeros here: the library then refuses the call."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

# FLASH_QLA_CHUNK_SIZE of c_api.h: part of the layout of A and h, so it cannot change without breaking callers.
CHUNK_SIZE = 64


def extents(shape: Sequence[int]) -> Tuple[int, int, int, int]:
    """The four extents of q, k or v."""
    return tuple(shape) if len(shape) == 4 else (0, 0, 0, 0)  # type: ignore[return-value]


def sequence_count(q_shape: Sequence[int], cu_seqlens_shape: Optional[Sequence[int]]) -> int:
    """N: the batch size, or the length of cu_seqlens less one."""
    if cu_seqlens_shape is None:
        return extents(q_shape)[0]
    return cu_seqlens_shape[0] - 1 if len(cu_seqlens_shape) == 1 and cu_seqlens_shape[0] > 0 else 0


def state_shape(
    q_shape: Sequence[int], v_shape: Sequence[int], sequences: int, state_v_first: bool
) -> Tuple[int, int, int, int]:
    """[N, Hv, K, V], or [N, Hv, V, K]."""
    _, _, heads, value = extents(v_shape)
    key = extents(q_shape)[3]
    return (sequences, heads, value, key) if state_v_first else (sequences, heads, key, value)


def gate_shape(v_shape: Sequence[int]) -> Tuple[int, int, int]:
    """[B, T, Hv]."""
    return extents(v_shape)[:3]


def a_shape(v_shape: Sequence[int]) -> Tuple[int, int, int, int]:
    """[B, T, Hv, 64]."""
    return (*gate_shape(v_shape), CHUNK_SIZE)


def chunk_rows(q_shape: Sequence[int], cu_seqlens: Any, cu_seqlens_cpu: Any) -> int:
    """Rows of h: one per chunk, counted sequence by sequence. Packed sequences without host offsets get the capacity
    floor(T / 64) + N, which no set of lengths exceeds."""
    batch, tokens = extents(q_shape)[:2]
    if cu_seqlens is None:
        return batch * -(-tokens // CHUNK_SIZE)
    if cu_seqlens_cpu is None:
        return tokens // CHUNK_SIZE + sequence_count(q_shape, cu_seqlens.shape)
    offsets: List[int] = list(cu_seqlens_cpu.tolist() if hasattr(cu_seqlens_cpu, "tolist") else cu_seqlens_cpu)
    return sum(-(-(end - begin) // CHUNK_SIZE) for begin, end in zip(offsets, offsets[1:]))
