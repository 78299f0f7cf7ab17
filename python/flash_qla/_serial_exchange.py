"""The exchange of true states: one rank after another computes its tokens and hands the final state on, and the
gradient of the initial state on the way back. It takes the time of all ranks together, and is for comparisons bit by
bit: where parts begin at multiples of 64 tokens of a sequence, with auto_cp=False, o and the states are those of one
rank."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _pieces, _torch, _torch_links
from ._options import Options
from ._pieces import Piece
from .distributed.cut import Parts
from .distributed.exchange import Ranks, gather
from .distributed.plan import Plan


class _Order(NamedTuple):
    """Who computes when."""

    ranks: Ranks
    places: int  # parts of the stream
    pieces: Tuple[Optional[Piece], ...]  # by place; None: another rank's
    packed: bool


def _order(plan: Plan, context_tokens: int, batch: int) -> _Order:
    ranks = plan.ranks
    if plan.cut is not None:
        lengths, counts, own, places = plan.cut.part_tokens, plan.cut.part_rows, plan.cut.places, len(plan.cut.bounds)
    else:
        lengths, own, places = [context_tokens], (ranks.rank,), ranks.size
        counts = [batch if plan.cu_seqlens is None else plan.cu_seqlens.shape[0] - 1]
        if plan.parts.order is not None:
            raise NotImplementedError("exchange='serial' must have contexts of this package with layout 'zigzag'")
    pieces: List[Optional[Piece]] = [None] * places
    token, row = 0, 0
    for place, length, count in zip(own, lengths, counts):
        pieces[place] = Piece((token, token + length), (row, row + count))
        token, row = token + length, row + count
    return _Order(ranks, places, tuple(pieces), plan.cu_seqlens is not None)


def _owner(order: _Order, place: int) -> int:
    return place if place < order.ranks.size else 2 * order.ranks.size - 1 - place


def _pass_on(options: Options, what: str, order: _Order, place: int, state: Tensor) -> Tensor:
    """The state that the owner of a place has made."""
    return gather(options.operation, what, order.ranks, state.contiguous())[_owner(order, place)]


def _crossing_rows(order: _Order, piece: Piece, part: int, rows: Tensor) -> Tensor:
    """entering_rows or leaving_rows of one part, counted from its own first row."""
    if not order.packed:
        return rows
    return _pieces.rows_in(rows[part : part + 1], piece)


def _handed_on(
    order: _Order, crossing: Tensor, states: Tensor, v_first: bool, carried: Tensor, has_tokens: Tensor
) -> Tensor:
    """What leaves a part: the state of its crossing row as [K, V], or what came where it has no tokens."""
    if states.shape[0] == 0:
        return carried
    found = states.transpose(-1, -2) if v_first else states
    if order.packed:
        found = found.index_select(0, crossing.clamp(min=0))
    return torch.where(has_tokens[:, None, None, None], found, carried)


def _has_tokens(order: _Order, parts: Parts, part: int) -> Tensor:
    first = parts.rows[:, 0] >= 0
    return first[part : part + 1] if order.packed else first


def _nothing(order: _Order, inputs: Sequence[Optional[Tensor]]) -> Tensor:
    q, v = inputs[0], inputs[2]
    count = 1 if order.packed else q.shape[0]  # type: ignore[union-attr]
    shape = (count, v.shape[2], q.shape[3], v.shape[3])  # type: ignore[union-attr]
    return q.new_zeros(shape, dtype=_torch._accumulator(q))  # type: ignore[arg-type, union-attr]


def _forward(options: Options, order: _Order, parts: Parts, inputs: tuple) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, the final states of all rows, A, and the states that entered."""
    o, final_state, A = _torch_links.forward_outputs(inputs, options.state_v_first, True, True)
    carried = _nothing(order, inputs)
    entered, part = [], 0
    for place, piece in enumerate(order.pieces):
        if piece is not None:
            rows = _crossing_rows(order, piece, part, parts.entering_rows)
            _pieces.forward(options, inputs, piece, (rows, carried), (o, final_state, A))
            entered.append(carried)
            crossing = _crossing_rows(order, piece, part, parts.leaving_rows)
            tokens = _has_tokens(order, parts, part)
            own = final_state[slice(*piece.rows)]
            carried = _handed_on(order, crossing, own, options.state_v_first, carried, tokens)
            part += 1
        if place + 1 < order.places:
            carried = _pass_on(options, "final states", order, place, carried)
    return o, final_state, A, torch.cat(entered)


def _backward(
    options: Options, order: _Order, parts: Parts, inputs: tuple, kept: tuple
) -> Tuple[List[Optional[Tensor]], Tensor]:
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, and the gradients of the states before all rows. `kept`: A, the states
    that entered, do, dht."""
    A, entered, do, dht = kept
    q, v = inputs[0], inputs[2]
    dh0 = _torch._state_like(q, v, inputs[7], options.state_v_first)
    gradients = _pieces.Gradients(inputs, dh0, (True,) * 7)
    carried = _nothing(order, inputs)
    part = sum(piece is not None for piece in order.pieces)
    for place in range(order.places - 1, -1, -1):
        piece = order.pieces[place]
        if piece is not None:
            part -= 1
            first = part if order.packed else 0
            states = (
                _crossing_rows(order, piece, part, parts.entering_rows),
                entered[first : first + carried.shape[0]],
                _crossing_rows(order, piece, part, parts.leaving_rows),
                carried,
            )
            gradients.add(options, piece, states, (A, do, dht))
            crossing, tokens = states[0], _has_tokens(order, parts, part)
            own = dh0[slice(*piece.rows)]
            carried = _handed_on(order, crossing, own, options.state_v_first, carried, tokens)
        if place > 0:
            carried = _pass_on(options, "gradients of states", order, place, carried)
    return gradients.all(), dh0


class _SerialGatedDeltaRule(torch.autograd.Function):
    """o and final_state, as _context_parallel's function gives them."""

    @staticmethod
    def forward(ctx: Any, options: Options, order: _Order, *tensors: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
        count = len(Parts._fields)
        parts, inputs = Parts(*tensors[:count]), tensors[count:]  # type: ignore[arg-type]
        o, final_state, A, entered = _forward(options, order, parts, inputs)
        final_state.masked_fill_(~parts.ends_here[:, None, None, None], 0.0)
        ctx.save_for_backward(*tensors, A, entered)
        ctx.options, ctx.order = options, order
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Optional[Tensor], dht: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        *tensors, A, entered = ctx.saved_tensors
        count = len(Parts._fields)
        parts, inputs = Parts(*tensors[:count]), tuple(tensors[count:])
        gradients, dh0 = _backward(ctx.options, ctx.order, parts, inputs, (A, entered, do, dht))
        initial_state = inputs[8]
        of_initial = None
        if initial_state is not None:
            dh0.masked_fill_(~parts.starts_here[:, None, None, None], 0.0)
            of_initial = dh0.to(initial_state.dtype)
        found: List[Optional[Tensor]] = [*gradients, of_initial]
        if torch.is_grad_enabled():
            found = _torch.refuse_second_derivatives(ctx.options.operation, found, (*inputs, do, dht))
        return (None,) * (2 + count) + (*found[:7], None, found[7])


@torch.compiler.disable
def chunk(
    options: Options, plan: Plan, inputs: Sequence[Optional[Tensor]], output_final_state: bool
) -> Tuple[Tensor, Optional[Tensor]]:
    """As _context_parallel.chunk(). Not under torch.compile."""
    q = inputs[0]
    order = _order(plan, q.shape[1], q.shape[0])  # type: ignore[union-attr]
    entered = (None, None)
    outputs = _torch_links.forward_outputs(tuple(inputs), options.state_v_first, True, True)
    _torch_links.check_forward(options, tuple(inputs), entered, outputs)
    o, final_state = _SerialGatedDeltaRule.apply(options, order, *plan.parts, *inputs)
    return o, final_state if output_final_state else None
