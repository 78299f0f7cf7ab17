"""Shapes and dtypes of results. Malformed inputs give shapes of zeros here: the library then refuses the call."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from ._options import integer

# FLASH_QLA_CHUNK_SIZE of flash_qla.h: part of the layout of A and h, so it cannot change without breaking callers.
CHUNK_SIZE = 64

# Types of __dlpack_device__() whose memory the host reads.
_DLPACK_CPU, _DLPACK_CUDA_HOST = 1, 3


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
    return (*extents(v_shape)[:3], CHUNK_SIZE)


def _on_host(x: Any) -> bool:
    kind = getattr(getattr(x, "device", None), "type", None)
    if kind is not None:  # torch's, meta among them
        return bool(kind == "cpu")
    return not hasattr(x, "__dlpack_device__") or x.__dlpack_device__()[0] in (_DLPACK_CPU, _DLPACK_CUDA_HOST)


def host_offsets(operation: str, q_shape: Sequence[int], cu_seqlens: Any, cu_seqlens_cpu: Any) -> List[int]:
    """cu_seqlens_cpu as a list, once it is one that cu_seqlens may have: [N + 1], from 0, never falling, up to T."""
    if not _on_host(cu_seqlens_cpu):
        raise ValueError(f"{operation}: cu_seqlens_cpu.device ({cu_seqlens_cpu.device}) must be the host")
    given = cu_seqlens_cpu.tolist() if hasattr(cu_seqlens_cpu, "tolist") else cu_seqlens_cpu
    if not isinstance(given, (list, tuple)):
        raise TypeError(f"{operation}: cu_seqlens_cpu ({type(cu_seqlens_cpu).__name__}) must be a vector or a list")
    offsets = [integer(operation, f"cu_seqlens_cpu[{i}]", value) for i, value in enumerate(given)]
    expected = sequence_count(q_shape, cu_seqlens.shape) + 1
    if len(offsets) != expected:
        raise ValueError(
            f"{operation}: cu_seqlens_cpu.shape[0] ({len(offsets)}) must be that of cu_seqlens ({expected})"
        )
    if offsets[0] != 0:
        raise ValueError(f"{operation}: cu_seqlens_cpu[0] ({offsets[0]}) must be 0")
    for i, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        if end < begin:
            raise ValueError(
                f"{operation}: cu_seqlens_cpu[{i + 1}] ({end}) must not be below cu_seqlens_cpu[{i}] ({begin})"
            )
    tokens = extents(q_shape)[1]
    if offsets[-1] > tokens:
        raise ValueError(
            f"{operation}: cu_seqlens_cpu[{len(offsets) - 1}] ({offsets[-1]}) must not be above q.shape[1] ({tokens})"
        )
    return offsets


def h_shape(
    q_shape: Sequence[int], v_shape: Sequence[int], chunks: int, state_v_first: bool
) -> Tuple[int, int, int, int, int]:
    """[B, chunks, Hv, K, V], or [B, chunks, Hv, V, K]."""
    return (extents(q_shape)[0], *state_shape(q_shape, v_shape, chunks, state_v_first))


def chunk_count(operation: str, q_shape: Sequence[int], cu_seqlens: Any, cu_seqlens_cpu: Any) -> int:
    """h.shape[1]: chunks of a batch row. Those of packed sequences are counted sequence by sequence; without host
    offsets there is room for floor(T / 64) + N, which no set of lengths exceeds."""
    tokens = extents(q_shape)[1]
    if cu_seqlens is None:
        return -(-tokens // CHUNK_SIZE)
    if cu_seqlens_cpu is None:
        return tokens // CHUNK_SIZE + sequence_count(q_shape, cu_seqlens.shape)
    offsets = host_offsets(operation, q_shape, cu_seqlens, cu_seqlens_cpu)
    return sum(-(-(end - begin) // CHUNK_SIZE) for begin, end in zip(offsets, offsets[1:]))
