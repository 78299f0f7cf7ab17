"""The four operations under context parallelism over cards, on torch tensors or DLPack arrays, without communication:
an engine gathers links by its own means. docs/several_cards.md explains them; C has them as flash_qla/sequence_cut.h,
chunk_summary.h, chunk_summary_backward.h and summary_combine.h."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Optional, Sequence, Tuple, Union

from .. import _dlpack, _ffi, _front
from .._options import integer, make_options


class SequenceCut(NamedTuple):
    """What sequence_cut() returns: R rows, the sequences of this rank's own calls, and its P parts."""

    local_cu_seqlens: Any  # [R + 1] int64, offsets in this rank's tokens
    sequences: Any  # [R] int64, number of each row among the stream's sequences; -1 behind the last
    starts_here: Any  # [R] bool: has its first token here (an empty one: is listed here)
    ends_here: Any  # [R] bool: its last
    row_counts: Any  # [P] int64, rows of each part
    rows: Any  # [P, 2] int64, row of a part's first token and of its last, -1 without tokens
    enters: Any  # [P] bool: the first token's sequence began before the part
    leaves: Any  # [P] bool: the last token's sequence goes on after it
    through: Any  # [P] bool: both, and it is one sequence
    entering_rows: Any  # [P] int64, rows[:, 0] where a sequence enters, else -1
    leaving_rows: Any  # [P] int64, rows[:, 1] where one leaves, else -1
    halo_tokens: Any  # [P] int64, tokens of the entering sequence before the part


class Links(NamedTuple):
    """How states go through parts: S_out = M S_in + S. Kinds are 0 (no tokens: S_out = S_in), 1 (S_out = S), 2."""

    S: Any  # [P, Hv, K, V] float32 (float64); of backward links R, for dS_left = M^T dS_right + R
    M: Any  # [P, Hv, K, K]
    kind: Any  # [P, Hv]
    packed: Any = None  # [P, Hv, K (V + K) + 4], the memory of torch's three: what a collective sends


def _maker(operation: str, like: Any) -> Tuple[bool, Any]:
    """Whether `like` is a torch tensor, and what makes arrays of its kind."""
    _front.find_torch()
    if _front.torch_front is not None and isinstance(like, _front.torch_front.Tensor):
        return True, like
    if not hasattr(like, "__dlpack__"):
        raise TypeError(f"{operation}: the first argument ({type(like).__name__}) must be a tensor or an array")
    return False, _dlpack.Arrays(operation, like)


def _torch_links() -> Any:
    from .. import _torch_links

    return _torch_links


def _threads(on_torch: bool, like: Any) -> int:
    return _front.torch_front._threads(like) if on_torch else 0


class _Call:
    """One native call: views of its arrays, and scratch of their kind."""

    def __init__(self, operation: str, like: Any) -> None:
        self.on_torch, self.maker = _maker(operation, like)
        self.threads = _threads(self.on_torch, like)
        self._like = like

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        if self.on_torch:
            import torch

            return self._like.new_empty(tuple(shape), dtype=getattr(torch, dtype))
        return self.maker.empty(shape, self.maker.named(dtype))

    def accumulator(self) -> str:
        return "float64" if str(self._like.dtype).endswith("float64") else "float32"

    def run(self, name: str, arguments: Sequence[Any]) -> None:
        if self.on_torch:
            _ffi.call(name, _front.torch_front._allocator(self._like), tuple(arguments))
        else:
            _ffi.call(name, self.maker.allocate, tuple(_dlpack.view_of(x) for x in arguments))


def sequence_cut(
    cu_seqlens: Any,
    bounds: Any,
    *,
    last_part: int = -1,
    all_rows: bool = False,
    rows: Optional[int] = None,
) -> SequenceCut:
    """Which sequences a rank holds, where one stream of packed tokens is cut over ranks.

    Args:
        cu_seqlens: [N + 1] int32 or int64, offsets of the sequences in the whole stream.
        bounds: [P, 2] int32 or int64, on cu_seqlens' device: first token of each of this rank's parts and the one after
            its last, ascending. Parts of all ranks cover the stream.
        last_part: the part with which the whole stream ends; -1: another rank has it.
        all_rows: R is P N, row p N + n is sequence n, empty where part p has none of it.
        rows: R without all_rows; None: N + P, which is always enough. Rows behind the last sequence are empty.

    Raises:
        ValueError, TypeError: a shape, dtype or number that the rules above forbid.
    """
    operation = "sequence_cut"
    call = _Call(operation, cu_seqlens)
    for name, x, expected in (("cu_seqlens", cu_seqlens, "[N + 1]"), ("bounds", bounds, "[P, 2]")):
        if len(x.shape) != (1 if name == "cu_seqlens" else 2) or x.shape[0] < 1:
            raise ValueError(f"{operation}: {name}.shape ({tuple(x.shape)}) must be {expected}")
    N, P = int(cu_seqlens.shape[0]) - 1, int(bounds.shape[0])
    R = P * N if all_rows else N + P if rows is None else integer(operation, "rows", rows, 0)
    index, flag = "int64", "bool"
    shapes = {"local_cu_seqlens": (R + 1,), "sequences": (R,), "starts_here": (R,), "ends_here": (R,), "rows": (P, 2)}
    flags = ("starts_here", "ends_here", "enters", "leaves", "through")
    found = SequenceCut(
        *(call.empty(shapes.get(name, (P,)), flag if name in flags else index) for name in SequenceCut._fields)
    )
    last_part = integer(operation, "last_part", last_part)
    call.run(operation, (operation, None, call.threads, cu_seqlens, bounds, last_part, bool(all_rows), *found))
    return found


def _new_links(call: _Call, P: int, Hv: int, K: int, V: int) -> Links:
    dtype = call.accumulator()
    if call.on_torch:
        module = _torch_links()
        packed = call.empty((P, Hv, module.row_size(K, V)), dtype)
        module.zero_padding(packed)
        return unpack_links(packed, K, V)
    return Links(*(call.empty(shape, dtype) for shape in ((P, Hv, K, V), (P, Hv, K, K), (P, Hv))))


def unpack_links(packed: Any, K: int, V: int) -> Links:
    """Views S [.., Hv, K, V], M [.., Hv, K, K] and kind [.., Hv] of packed links [.., Hv, K (V + K) + 4], as a
    collective has gathered them. Torch tensors."""
    found = _torch_links().unpack(packed, K, V)
    return Links(found.S, found.M, found.kind, packed)


def chunk_summary(
    k: Any,
    v: Any,
    g: Optional[Any],
    beta: Optional[Any],
    rows: Any,
    leaves: Any,
    through: Any,
    *,
    initial_state: Optional[Any] = None,
    cu_seqlens: Optional[Any] = None,
    A_log: Optional[Any] = None,
    dt_bias: Optional[Any] = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    auto_cp: Union[bool, Literal["invariant"]] = True,
    cp_tolerance: Optional[float] = None,
) -> Links:
    """Forward links of a rank's parts: of each the one of its last token's sequence, where that goes on after the part.

    Args:
        k, v, g, beta, initial_state, cu_seqlens and options: this rank's, as chunk_gated_delta_rule() takes them.
        rows, leaves, through: as sequence_cut() returns them.
        auto_cp: False: nothing that a head has forgotten is left out. Else a head whose gates have let everything decay
            that entered the part (to cp_tolerance, 1.2e-7 at most, of the largest state) has a constant link.

    Returns:
        Links: [K, V] whatever state_v_first says.
    """
    operation = "chunk_summary"
    options = make_options(
        operation,
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        auto_cp=auto_cp,
        cp_tolerance=cp_tolerance,
    )
    call = _Call(operation, k)
    P, Hv, K, V = _link_sizes(operation, rows, v, k)
    links = _new_links(call, P, Hv, K, V)
    inputs = (k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, rows, leaves, through)
    call.run(operation, (*options, call.threads, *inputs, *links[:3], None))
    return links


def _link_sizes(operation: str, rows: Any, values: Any, keys: Any) -> Tuple[int, int, int, int]:
    for name, x, rank in (("rows", rows, 2), ("v", values, 4), ("k", keys, 4)):
        if len(x.shape) != rank:
            raise ValueError(f"{operation}: {name}.ndim ({len(x.shape)}) must be {rank}")
    return int(rows.shape[0]), int(values.shape[2]), int(keys.shape[3]), int(values.shape[3])


def chunk_summary_backward(
    q: Any,
    k: Any,
    g: Optional[Any],
    beta: Optional[Any],
    do: Optional[Any],
    rows: Any,
    enters: Any,
    through: Any,
    forward: Links,
    *,
    dht: Optional[Any] = None,
    A: Optional[Any] = None,
    cu_seqlens: Optional[Any] = None,
    A_log: Optional[Any] = None,
    dt_bias: Optional[Any] = None,
    scale: Optional[float] = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    auto_cp: Union[bool, Literal["invariant"]] = True,
    cp_tolerance: Optional[float] = None,
) -> Links:
    """Backward links of a rank's parts: of each the one of its first token's sequence, where that began before the
    part. They do not depend on the states that entered.

    Args:
        q, k, g, beta, do, dht, cu_seqlens and options: this rank's, as chunk_gated_delta_rule() and its backward pass
            take them. do None: zero.
        rows, enters, through: as sequence_cut() returns them.
        forward: the forward links of these parts.
        A: [B, T, Hv, 64], optional: what the forward pass has kept for the backward pass; saves time.

    Returns:
        Links, with R in the place of S and the M of the forward links.
    """
    operation = "chunk_summary_backward"
    options = make_options(
        operation,
        scale=scale,
        state_v_first=state_v_first,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        auto_cp=auto_cp,
        cp_tolerance=cp_tolerance,
    )
    call = _Call(operation, q)
    P, Hv, K, V = (int(x) for x in forward.S.shape)
    links = _new_links(call, P, Hv, K, V)
    if call.on_torch:
        links.M.copy_(forward.M)
    else:
        links = links._replace(M=forward.M)
    inputs = (q, k, g, beta, A_log, dt_bias, cu_seqlens, do, dht, A, rows, enters, through, forward.kind)
    call.run(operation, (*options, call.threads, *inputs, links.S, links.kind))
    return links


def summary_combine(
    links: Links,
    place: Any,
    wanted: Optional[Any] = None,
    *,
    order: Optional[Any] = None,
    backward: bool = False,
) -> Any:
    """What enters each of a rank's parts: states from the left, or with `backward` their gradients from the right.

    Args:
        links: S [L, C, Hv, K, V], M [L, C, Hv, K, K], kind [L, C, Hv] of all L parts of C independent streams (rows of
            a batch; 1 where sequences are packed), any strides.
        place: [P] int32 or int64, where the rank's parts stand in the stream; L (backward: -1) is beyond all of them.
        wanted: [P] bool, sequence_cut()'s `enters`, or `leaves` with backward; None: all.
        order: [L] int32 or int64, row of `links` with the stream's i-th part; None: they lie in its order.

    Returns:
        [P, C, Hv, K, V], dtype of the links, zeros where nothing is wanted.
    """
    operation = "summary_combine"
    call = _Call(operation, links.S)
    shape = [int(x) for x in links.S.shape]
    if len(shape) != 5:
        raise ValueError(f"{operation}: S.ndim ({len(shape)}) must be 5")
    state = call.empty((int(place.shape[0]), *shape[1:]), call.accumulator())
    arguments = (*links[:3], order, place, wanted, bool(backward), state, None, None, None)
    call.run(operation, (operation, None, call.threads, *arguments))
    return state


def compose_links(links: Links, *, order: Optional[Any] = None, backward: bool = False) -> Links:
    """All L links as one: S [C, Hv, K, V], M [C, Hv, K, K], kind [C, Hv]. A machine sends one over its slow wire for
    all of its cards. Arguments as summary_combine()."""
    operation = "summary_combine"
    call = _Call(operation, links.S)
    shape = [int(x) for x in links.S.shape]
    if len(shape) != 5:
        raise ValueError(f"{operation}: S.ndim ({len(shape)}) must be 5")
    found = _new_links(call, *shape[1:])
    arguments = (*links[:3], order, None, None, bool(backward), None, *found[:3])
    call.run(operation, (operation, None, call.threads, *arguments))
    return found


__all__ = [
    "Links",
    "SequenceCut",
    "chunk_summary",
    "chunk_summary_backward",
    "compose_links",
    "sequence_cut",
    "summary_combine",
    "unpack_links",
]
