"""The low-level calls on numpy arrays and other DLPack tensors: no PyTorch, no gradients.

Results are numpy arrays for numpy inputs. For another array type they come from its own namespace (the Python array
API's `x.__array_namespace__()`, or the package it is from), so they are arrays of that type, on its device: new ones,
also where the package's arrays are immutable. Such an array is never written otherwise: a call that was to write one of
the caller's is refused. CUDA work of arrays that are not torch's is queued on the default stream.
"""

from __future__ import annotations

import sys
from typing import Any, List, Optional, Sequence, Tuple

from . import _ffi
from ._options import CONVERTIBLE, Options
from ._shapes import a_shape, gate_shape, h_shape, sequence_count, state_shape

# tvm-ffi, which makes views of arrays, once there has been a call.
tvm_ffi: Any = None


def _load() -> None:
    global tvm_ffi
    if tvm_ffi is None:
        _ffi.load()
        tvm_ffi = _ffi.tvm_ffi


def _is_numpy(x: Any) -> bool:
    numpy = sys.modules.get("numpy")  # imported by whoever made the array
    return numpy is not None and isinstance(x, numpy.ndarray)


class Arrays:
    """Makes arrays of the kind of `like`."""

    def __init__(self, operation: str, like: Any) -> None:
        _load()
        place: dict = {}
        if hasattr(like, "__array_namespace__") and not _is_numpy(like):
            namespace: Any = like.__array_namespace__()
            place = {"device": like.device}
        else:  # numpy, and packages in its image (CuPy)
            namespace = sys.modules.get(type(like).__module__.partition(".")[0])
        if not all(hasattr(namespace, name) for name in ("empty", "float32", "float64", "uint8")):
            raise TypeError(
                f"{operation}: q ({type(like).__name__}) must be a numpy array, a torch.Tensor or an array whose "
                "package has numpy's empty()"
            )
        self._namespace, self._place = namespace, place
        self.dtype = like.dtype
        self.accumulator = namespace.float64 if like.dtype == namespace.float64 else namespace.float32

    def cast(self, x: Any, dtype: Any) -> Any:
        if hasattr(self._namespace, "astype"):  # the array API's; older packages have the method
            return self._namespace.astype(x, dtype)
        return x.astype(dtype)

    def to_float32(self, x: Any) -> Any:
        return self.cast(x, self._namespace.float32)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._namespace.empty(tuple(shape), dtype=dtype, **self._place)

    def named(self, dtype: str) -> Any:
        """The dtype of a name; numpy before 2.0 calls its bool by another."""
        return getattr(self._namespace, dtype, None) or getattr(self._namespace, dtype + "_")

    def allocate(self, size: int) -> Any:
        return tvm_ffi.from_dlpack(self.empty((size,), self._namespace.uint8))


def _view(x: Any) -> Any:
    """The native module's view of an array: of its memory, or of a copy where numpy exports none (read-only arrays)."""
    if x is None:
        return None
    try:
        return tvm_ffi.from_dlpack(x)
    except BufferError:
        if _is_numpy(x) and not x.flags.writeable:
            return tvm_ffi.from_dlpack(x.copy())
        raise


# Packages whose arrays are immutable, which DLPack does not say: their __dlpack__() hands out plain memory.
_IMMUTABLE = frozenset(("jax", "jaxlib"))


def _written_view(operation: str, name: str, x: Any) -> Any:
    """The native module's view of an array that a caller hands over to be written."""
    if type(x).__module__.partition(".")[0] in _IMMUTABLE:
        raise ValueError(f"{operation}: {name} (an immutable {type(x).__name__}) must be writeable")
    try:
        return None if x is None else tvm_ffi.from_dlpack(x)
    except BufferError:  # what numpy and others raise where memory may only be read
        raise ValueError(f"{operation}: {name} (a read-only array) must be writeable") from None


def view_of(x: Any) -> Any:
    """The native module's view of an argument, if it is an array."""
    return _view(x) if hasattr(x, "__dlpack__") else x


def _views(arrays: Sequence[Any]) -> List[Any]:
    return [_view(x) for x in arrays]


# state_pool .. num_accepted_tokens, null_index, checkpoint_every, checkpoints .. checkpoint_indices of a call without.
_NO_POOL = (None,) * 5 + (-1, 0) + (None,) * 4


def _dtype_name(x: Any) -> str:
    return str(x.dtype).rpartition(".")[2]


def _shape(x: Any) -> Optional[Tuple[int, ...]]:
    return None if x is None else tuple(x.shape)


def _state(arrays: Arrays, q: Any, v: Any, cu_seqlens: Any, options: Options) -> Any:
    shape = state_shape(q.shape, v.shape, sequence_count(q.shape, _shape(cu_seqlens)), options.state_v_first)
    return arrays.empty(shape, arrays.accumulator)


def _forward(options: Options, recurrent: bool, inputs: Sequence[Any], outputs: Sequence[Any], arrays: Arrays) -> None:
    views = _views(inputs), _views(outputs)
    _ffi.forward(arrays.allocate, (recurrent, *options, 0, *views[0], *_NO_POOL, *views[1]))


def forward(
    options: Options, recurrent: bool, inputs: Sequence[Any], output_final_state: bool
) -> Tuple[Any, Optional[Any]]:
    """(o, final_state). `inputs`: q .. initial_state."""
    q, k, v, *rest = inputs
    arrays = Arrays(options.operation, q)
    if recurrent and not q.dtype == k.dtype == v.dtype and all(_dtype_name(x) in CONVERTIBLE for x in (q, k, v)):
        wide = [arrays.to_float32(x) for x in (q, k, v)]
        o, final_state = forward(options, recurrent, (*wide, *rest), output_final_state)
        return arrays.cast(o, v.dtype), final_state
    o = arrays.empty(v.shape, arrays.dtype)
    final_state = _state(arrays, q, v, inputs[7], options) if output_final_state else None
    _forward(options, recurrent, inputs, (o, final_state, None, None, None), arrays)
    return o, final_state


def chunk_fwd(
    options: Options, inputs: Sequence[Any], output_final_state: bool, chunks: Optional[int]
) -> Tuple[Any, ...]:
    """(g, A, o, h, final_state) of chunk_gated_delta_rule_fwd(). `inputs`: q .. initial_state."""
    q, k, v, *_ = inputs
    arrays = Arrays(options.operation, q)
    o = arrays.empty(v.shape, arrays.dtype)
    final_state = _state(arrays, q, v, inputs[7], options) if output_final_state else None
    g_cumsum = arrays.empty(gate_shape(v.shape), arrays.accumulator)
    A = arrays.empty(a_shape(v.shape), arrays.dtype)
    h = None
    if chunks is not None:
        h = arrays.empty(h_shape(q.shape, v.shape, chunks, options.state_v_first), arrays.dtype)
    _forward(options, False, inputs, (o, final_state, g_cumsum, A, h), arrays)
    return g_cumsum, A, o, h, final_state


def chunk_bwd(options: Options, inputs: Sequence[Any], A: Any, do: Any, dht: Any) -> Tuple[Any, ...]:
    """(dq, dk, dv, db, dg, dh0) of chunk_gated_delta_rule_bwd(). `inputs`: q .. initial_state."""
    q, k, v, g, beta, _, _, _, initial_state = inputs
    arrays = Arrays(options.operation, q)
    dq, dk, dv, dg, db = (None if x is None else arrays.empty(x.shape, x.dtype) for x in (q, k, v, g, beta))
    dh0 = None if initial_state is None else arrays.empty(initial_state.shape, arrays.accumulator)
    before = _views(inputs), _views((A, None, do, dht))
    after = _views((dq, dk, dv, dg, db, dh0, None, None))
    _ffi.backward(arrays.allocate, (*options, 0, *before[0], g is not None, *before[1], *after, None))
    return dq, dk, dv, db, dg, dh0


def verify(options: Options, inputs: Sequence[Any], states: Sequence[Any], out: Optional[Any]) -> Any:
    """o of gated_delta_rule_verify(). `inputs`: q .. dt_bias; `states`: state_pool .. null_index."""
    arrays = Arrays(options.operation, inputs[0])
    pool, indices, parents, states_out, rows, null_index = states
    views = (*_views((pool, indices, parents)), _written_view(options.operation, "states_out", states_out), _view(rows))
    o = arrays.empty(inputs[2].shape, arrays.dtype) if out is None else out
    o_view = _written_view(options.operation, "out", out) if out is not None else tvm_ffi.from_dlpack(o)
    _ffi.verify(arrays.allocate, (*options, 0, *_views(inputs), *views, null_index, o_view))
    return o


def pool(options: Options, recurrent: bool, inputs: Sequence[Any], states: Sequence[Any], out: Optional[Any]) -> Any:
    """o of gated_delta_rule_prefill() and gated_delta_rule_decode(). `inputs`: q .. cu_seqlens; `states`: state_pool ..
    checkpoint_indices."""
    q, v = inputs[0], inputs[2]
    arrays = Arrays(options.operation, q)
    written = {0: "state_pool", 7: "checkpoints"}
    views: List[Any] = []
    for i, x in enumerate(states):
        if i in written:
            views.append(_written_view(options.operation, written[i], x))
        else:
            views.append(x if isinstance(x, int) else _view(x))
    o = arrays.empty(v.shape, arrays.dtype) if out is None else out
    o_view = _written_view(options.operation, "out", out) if out is not None else tvm_ffi.from_dlpack(o)
    absent = (None,) * 4
    _ffi.forward(arrays.allocate, (recurrent, *options, 0, *_views(inputs), None, *views, o_view, *absent))
    return o
