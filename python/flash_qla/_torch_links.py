"""PyTorch operators for streams that are cut over ranks: links of parts, what enters from them, and the chunked calls
with states of parts. docs/several_cards.md explains the terms; _context_parallel.py puts them together.

A link travels as one packed row of numbers: S [K, V], M [K, K], the kind, and three zeros.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _ffi, _torch
from ._identity import NAMESPACE
from ._options import BACKWARD_NAMES, INPUT_NAMES, Options
from ._shapes import a_shape
from ._torch import _OPTIONS, _accumulator, _allocator, _define, _output_like, _present, _state_like, _threads

# Numbers behind S and M: the kind, and zeros that keep rows on 16-byte boundaries.
KIND_SIZE = 4


class Links(NamedTuple):
    """Views of packed links [.., Hv, K (V + K) + 4]."""

    S: Tensor  # [.., Hv, K, V]
    M: Tensor  # [.., Hv, K, K]
    kind: Tensor  # [.., Hv]


def row_size(K: int, V: int) -> int:
    """Numbers of one value head's packed link."""
    return K * (V + K) + KIND_SIZE


def zero_padding(packed: Tensor) -> None:
    """Zeroes what stands behind the kinds: nothing of an older buffer is sent."""
    packed[..., 1 - KIND_SIZE :].zero_()


def unpack(packed: Tensor, K: int, V: int) -> Links:
    """The links in packed rows."""
    S = packed[..., : K * V].unflatten(-1, (K, V))
    M = packed[..., K * V : K * (V + K)].unflatten(-1, (K, K))
    return Links(S, M, packed[..., K * (V + K)])


def _link_path(path: Optional[str]) -> Optional[str]:
    """The path for links beside a call that takes `path`: oracles have their own, the others leave the choice."""
    return path if path in ("reference", "cuda_reference", "cuda_generic") else None


def _link_options(options: Options) -> Options:
    return options._replace(path=_link_path(options.path))


# chunk_summary: the packed forward links [P, Hv, row]. `carry`, from new_carry(): what the forward of the same tokens
# can go on from.


def _summary_output(k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    return k.new_empty((rows.shape[0], v.shape[2], row_size(k.shape[-1], v.shape[-1])), dtype=_accumulator(k))


def _chunk_summary(options: Options, inputs: tuple, rest: tuple) -> Tensor:
    k, v = inputs[0], inputs[1]
    packed = _summary_output(k, v, rest[0])
    zero_padding(packed)
    links = unpack(packed, k.shape[-1], v.shape[-1])
    arguments = (*_link_options(options), _threads(k), *inputs, *rest[:3], *links, rest[3])
    _ffi.call("chunk_summary", _allocator(k), arguments)
    return packed


def new_carry(options: Options, inputs: tuple, cut: tuple) -> Optional[Tensor]:
    """Room for a carry of chunk_summary(), or None where no kernel makes one. Not in a traced call: its size is the
    card's. `cut`: rows, leaves, through."""
    k, v = inputs[0], inputs[1]
    if not k.is_cuda or k.dtype not in (torch.bfloat16, torch.float16) or not _torch._nobody_watches((*inputs, *cut)):
        return None
    links = unpack(_summary_output(k, v, cut[0]), k.shape[-1], v.shape[-1])
    size = _ffi.carry_size((*_link_options(options), _threads(k), *inputs, *cut, *links, None))
    return k.new_empty((cut[0].shape[0], size), dtype=torch.float32) if size > 0 else None


def _chunk_summary_fake(options: Options, inputs: tuple, rest: tuple) -> Tensor:
    return _summary_output(inputs[0], inputs[1], rest[0])


_SUMMARY_NAMES = (
    *("k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state"),
    *("rows", "leaves", "through", "carry"),
)

_define(
    f"chunk_summary({_OPTIONS}, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, Tensor? initial_state, Tensor rows, Tensor leaves, Tensor through, Tensor(a!)? carry) "
    "-> Tensor",
    _chunk_summary,
    _chunk_summary_fake,
    inputs=8,
)
_torch._NAMES["chunk_summary"] = _SUMMARY_NAMES


# chunk_summary_backward: the packed backward links [P, Hv, row], with R in the place of S. `kept`: M, the kind and
# zeros of the forward links, [P, Hv, K K + 4].


def _backward_summary_output(q: Tensor, kept: Tensor, V: int) -> Tensor:
    return kept.new_empty((*kept.shape[:2], row_size(q.shape[-1], V)))


def _chunk_summary_backward(options: Options, inputs: tuple, rest: tuple) -> Tensor:
    rows, enters, through, kept, V = rest
    q = inputs[0]
    K = q.shape[-1]
    packed = _backward_summary_output(q, kept, V)
    packed[..., K * V :] = kept
    R, _, kind = unpack(packed, K, V)
    arguments = (*inputs, rows, enters, through, kept[..., K * K], R, kind)
    _ffi.call("chunk_summary_backward", _allocator(q), (*_link_options(options), _threads(q), *arguments))
    return packed


def _chunk_summary_backward_fake(options: Options, inputs: tuple, rest: tuple) -> Tensor:
    return _backward_summary_output(inputs[0], rest[3], rest[4])


_define(
    f"chunk_summary_backward({_OPTIONS}, Tensor q, Tensor k, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor? cu_seqlens, Tensor? do, Tensor? dht, Tensor? A, Tensor rows, Tensor enters, Tensor through, Tensor kept, "
    "SymInt V) -> Tensor",
    _chunk_summary_backward,
    _chunk_summary_backward_fake,
    inputs=10,
)
_torch._NAMES["chunk_summary_backward"] = (
    *("q", "k", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "do", "dht", "A"),
    *("rows", "enters", "through", "kept"),
)


# summary_combine: what enters each of this rank's parts, [P, Hv, K, V], from the packed links [L, C, Hv, row] of all.


def _summary_combine(
    operation: str,
    path: Optional[str],
    gathered: Tensor,
    K: int,
    V: int,
    order: Optional[Tensor],
    place: Tensor,
    wanted: Tensor,
    backward: bool,
) -> Tensor:
    state = _combine_output(gathered, K, V, place)
    arguments = (*unpack(gathered, K, V), order, place, wanted, backward, state, None, None, None)
    _ffi.call(
        "summary_combine", _allocator(gathered), (operation, _link_path(path), _threads(gathered), *arguments)
    )
    return state


def _combine_output(gathered: Tensor, K: int, V: int, place: Tensor) -> Tensor:
    return gathered.new_empty((place.shape[0], *gathered.shape[1:3], K, V))


_torch._library.define(
    "summary_combine(str operation, str? path, Tensor gathered, SymInt K, SymInt V, Tensor? order, Tensor place, "
    "Tensor wanted, bool backward) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_torch._library.impl("summary_combine", _summary_combine, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::summary_combine", lib=_torch._library)
def _(
    operation: str,
    path: Optional[str],
    gathered: Tensor,
    K: int,
    V: int,
    order: Optional[Tensor],
    place: Tensor,
    wanted: Tensor,
    backward: bool,
) -> Tensor:
    return _combine_output(gathered, K, V, place)


def combine(
    operation: str,
    path: Optional[str],
    gathered: Tensor,
    K: int,
    V: int,
    order: Optional[Tensor],
    place: Tensor,
    wanted: Tensor,
    backward: bool,
) -> Tensor:
    """What enters each part from the left, or with `backward` from the right: [P, C, Hv, K, V]."""
    function = _torch._ops.summary_combine if _torch.is_traced() else _summary_combine
    return function(operation, path, gathered, K, V, order, place, wanted, backward)


# part_forward: chunk_forward with the states that entered parts; o, then final_state and A where asked for.


def forward_into(
    options: Options,
    inputs: tuple,
    entering: tuple,
    outputs: Tuple[Optional[Tensor], ...],
    carry: Optional[Tensor] = None,
) -> None:
    """`inputs`: q .. initial_state; `entering`: rows and states; `outputs`: o, final_state, A, which may be views;
    `carry`: what chunk_summary() of the same inputs has left."""
    q = inputs[0]
    _ffi.call("part_forward", _allocator(q), (*options, _threads(q), *inputs, *entering, carry, *outputs))


def forward_outputs(inputs: tuple, state_v_first: bool, output_final_state: bool, output_A: bool) -> tuple:
    """o, final_state, A; None where not wanted."""
    q, k, v, cu_seqlens = inputs[0], inputs[1], inputs[2], inputs[7]
    return (
        _output_like(q, v),
        _state_like(q, v, cu_seqlens, state_v_first) if output_final_state else None,
        k.new_empty(a_shape(v.shape)) if output_A else None,
    )


def check_forward(options: Options, inputs: tuple, entering: tuple, outputs: Tuple[Optional[Tensor], ...]) -> None:
    """Raises what forward_into() would, and computes nothing."""
    _ffi.check("part_forward", (*options, _threads(inputs[0]), *inputs, *entering, None, *outputs))


def _part_forward(options: Options, inputs: tuple, rest: tuple) -> List[Tensor]:
    outputs = forward_outputs(inputs, options.state_v_first, *rest[3:])
    forward_into(options, inputs, rest[:2], outputs, rest[2])
    return _present(outputs)


def _part_forward_fake(options: Options, inputs: tuple, rest: tuple) -> List[Tensor]:
    return _present(forward_outputs(inputs, options.state_v_first, *rest[3:]))


_define(
    f"part_forward({_OPTIONS}, {_torch._INPUTS}, Tensor? initial_state, Tensor? entering_rows, Tensor? entering_state, "
    "Tensor? carry, bool output_final_state, bool output_A) -> Tensor[]",
    _part_forward,
    _part_forward_fake,
)
_torch._NAMES["part_forward"] = (*INPUT_NAMES, "entering_rows", "entering_state", "carry")


# part_backward: chunk_backward with states of parts; results as there, dh0 in float32 (float64).


def backward_into(
    options: Options, inputs: tuple, states: tuple, kept: tuple, gradients: Tuple[Optional[Tensor], ...]
) -> None:
    """`states`: entering rows and states, leaving rows and gradients; `kept`: A, do, dht; `gradients`: dq, dk, dv, dg,
    dbeta, dh0, dA_log, ddt_bias, which may be views."""
    q = inputs[0]
    _ffi.call("part_backward", _allocator(q), (*options, _threads(q), *inputs, *states, *kept, *gradients))


def _part_backward(options: Options, inputs: tuple, rest: tuple) -> List[Tensor]:
    states, kept, wanted = rest[:4], rest[4:7], rest[7]
    outputs = _torch._backward_outputs(inputs, False, wanted)
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0 = outputs
    backward_into(options, inputs, states, kept, (dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias))
    return _present(outputs)


def _part_backward_fake(options: Options, inputs: tuple, rest: tuple) -> List[Tensor]:
    return _present(_torch._backward_outputs(inputs, False, rest[7]))


_define(
    f"part_backward({_OPTIONS}, {_torch._INPUTS}, Tensor? initial_state, Tensor? entering_rows, "
    "Tensor? entering_state, Tensor? leaving_rows, Tensor? leaving_dht, Tensor? A, Tensor? do, Tensor? dht, "
    "bool[] wanted) -> Tensor[]",
    _part_backward,
    _part_backward_fake,
)
_torch._NAMES["part_backward"] = (
    *INPUT_NAMES,
    *("entering_rows", "entering_state", "leaving_rows", "leaving_dht"),
    *BACKWARD_NAMES[len(INPUT_NAMES) :],
)


# sequence_cut writes into tensors that are there: it has no operator, because contexts are built outside of a graph.


def sequence_cut(
    cu_seqlens: Tensor, bounds: Tensor, last_part: int, all_rows: bool, outputs: Sequence[Optional[Tensor]]
) -> None:
    """`outputs`: local_cu_seqlens .. halo_tokens, as the C structure lists them."""
    arguments = ("sequence_cut", None, _threads(cu_seqlens), cu_seqlens, bounds, last_part, all_rows, *outputs)
    _ffi.call("sequence_cut", _allocator(cu_seqlens), arguments)


def compute(name: str, tensors: Sequence[Optional[Tensor]], options: Options, inputs: tuple, rest: tuple) -> Any:
    """_torch._compute() of an operator of this module."""
    return _torch._compute(name, tensors, options, inputs, rest)
