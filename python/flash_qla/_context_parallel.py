"""chunk_gated_delta_rule() on streams that are cut over ranks: one gather of links each way, and autograd around it.

Forward: each rank reduces its parts to links, gathers everybody's, makes of those before its parts the states that
enter them, and computes its tokens from there. Backward: the same from right to left. docs/several_cards.md has the
equations.
"""

from __future__ import annotations

from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _ffi, _pieces, _serial_exchange, _torch, _torch_links
from ._options import Options
from ._pieces import Halves
from .distributed import agreement
from .distributed.cut import Parts
from .distributed.exchange import Ranks, start_gather
from .distributed.plan import Plan, plan_of

# Where q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state stand among the inputs of a call.
_Q, _V, _CU, _H0 = 0, 2, 7, 8


class Static(NamedTuple):
    """What of a plan is no tensor."""

    ranks: Ranks
    packed: bool  # parts are runs of packed tokens, else rows of the batch
    exchanges: bool
    masked: bool  # some rows of states belong to sequences that begin or end at another rank, or may
    # What waits for no other rank, forward and backward, as far as the host knows.
    forward: Optional[Halves] = None
    backward: Optional[Halves] = None


def static_of(plan: Plan) -> Static:
    ranks = plan.ranks
    if torch.compiler.is_compiling():
        ranks = Ranks(ranks.rank, ranks.size, None, ranks.name)
    masked = plan.exchanges or plan.cu_seqlens is None
    static = Static(ranks, plan.cu_seqlens is not None, plan.exchanges, masked)
    cut = plan.cut
    if _torch.is_traced() or not plan.exchanges or cut is None or cut.local_offsets is None or len(cut.places) > 1:
        return static
    offsets, tokens = cut.local_offsets, cut.part_tokens[0]
    return static._replace(
        forward=_pieces.forward_halves(offsets, tokens, cut.entering_rows[0]),
        backward=_pieces.backward_halves(offsets, tokens, cut.leaving_rows[0]),
    )


def make_link(
    options: Options, inputs: Sequence[Optional[Tensor]], parts: Parts
) -> Tuple[Tensor, Optional[Tensor]]:
    """This rank's packed forward links [P, Hv, row], and what the forward of the same inputs can go on from, where the
    device's kernels leave it."""
    of_link = (*inputs[1:7], inputs[_CU], inputs[_H0])
    cut = (parts.rows, parts.leaves, parts.through)
    carry = _torch_links.new_carry(options, of_link, cut)
    rest = (*cut, carry)
    link: Tensor = _torch_links.compute("chunk_summary", (*of_link, *rest), options, of_link, rest)
    return link, carry


def make_backward_link(
    options: Options,
    inputs: Sequence[Optional[Tensor]],
    parts: Parts,
    kept: Tensor,
    do: Optional[Tensor],
    dht: Optional[Tensor],
    A: Optional[Tensor],
) -> Tensor:
    """This rank's packed backward links. `kept`: what keep_of() has left of the forward ones; A: the forward's."""
    q, k, v, g, beta, A_log, dt_bias, cu_seqlens, _ = inputs
    of_link = (q, k, g, beta, A_log, dt_bias, cu_seqlens, do, dht, A)
    cut = (parts.rows, parts.enters, parts.through, kept)
    assert v is not None
    tensors = (*of_link, *cut)
    link: Tensor = _torch_links.compute("chunk_summary_backward", tensors, options, of_link, (*cut, v.shape[-1]))
    return link


def keep_of(link: Tensor, K: int, V: int) -> Tensor:
    """What the backward pass needs of this rank's own forward links: M and the kind."""
    return link[..., K * V :].contiguous()


def entering(
    options: Options, static: Static, parts: Parts, gathered: Tensor, K: int, V: int, backward: bool
) -> Tensor:
    """What enters this rank's parts, [P, Hv, K, V]: states from the left, or gradients of them from the right.
    `gathered`: [ranks, P, Hv, row]."""
    wanted = parts.leaves if backward else parts.enters
    if static.packed:  # a rank's parts are links of one stream
        links = gathered.flatten(0, 1).unsqueeze(1)
        state = _torch_links.combine(
            options.operation, options.path, links, K, V, parts.order, parts.place, wanted, backward
        )
        return state.squeeze(1)
    state = _torch_links.combine(  # batch rows are streams of their own, all cut alike
        options.operation, options.path, gathered, K, V, None, parts.place, wanted[:1], backward
    )
    return state.squeeze(0)


def _zero_rows(states: Optional[Tensor], kept: Tensor, masked: bool) -> Optional[Tensor]:
    """The states with zeros for sequences that do not begin (end) here: sums over ranks are then the whole stream's.
    Not in place: PyTorch 2.11 compiles an autograd.Function wrongly that changes a result of its forward."""
    if states is None or not masked:
        return states
    return states.masked_fill(~kept[:, None, None, None], 0.0)


def _start(options: Options, what: str, static: Static, link: Tensor) -> Callable[[], Tensor]:
    return start_gather(options.operation, what, static.ranks, link)


def _before_the_gather(halves: Optional[Halves], link: Tensor) -> Optional[Halves]:
    """The halves, if one of them is computed while the gather runs: on a CPU. A GPU's forward fills all multiprocessors
    until it ends: the gather, which needs some too, would wait for it on this rank, and every other rank with it."""
    return halves if link.device.type == "cpu" else None


def _forward(
    options: Options,
    static: Static,
    parts: Parts,
    inputs: Sequence[Optional[Tensor]],
    output_final_state: bool,
    output_A: bool,
) -> Tuple[Optional[Tensor], ...]:
    """o, final_state, A, the states that entered, and what is kept of the links (both None without an exchange)."""
    wanted = (True, output_final_state, output_A)
    if not static.exchanges:
        found = _torch_links.compute("part_forward", inputs, options, tuple(inputs), (*(None,) * 3, *wanted[1:]))
        o, final_state, A = _torch._align(found, wanted)
        return o, _zero_rows(final_state, parts.ends_here, static.masked), A, None, None
    K, V = inputs[_Q].shape[-1], inputs[_V].shape[-1]  # type: ignore[union-attr]
    if not _torch.is_traced():
        check_call(options, inputs, output_final_state)
    link, carry = make_link(options, inputs, parts)
    wait = _start(options, "forward links", static, link)
    kept = keep_of(link, K, V) if output_A else None
    halves = _before_the_gather(static.forward, link)
    if halves is None:
        entered = entering(options, static, parts, wait(), K, V, False)
        rest = (parts.entering_rows, entered, carry, *wanted[1:])
        found = _torch_links.compute("part_forward", (*inputs, *rest[:3]), options, tuple(inputs), rest)
        o, final_state, A = _torch._align(found, wanted)
    else:
        outputs = _torch_links.forward_outputs(tuple(inputs), options.state_v_first, *wanted[1:])
        _pieces.forward(options, inputs, halves.local, (None, None), outputs)
        entered = entering(options, static, parts, wait(), K, V, False)
        if halves.waiting is not None:
            _pieces.forward(options, inputs, halves.waiting, (parts.entering_rows, entered), outputs)
        o, final_state, A = outputs
    return o, _zero_rows(final_state, parts.ends_here, static.masked), A, entered, kept


def _backward(
    options: Options, static: Static, parts: Parts, inputs: tuple, kept: tuple, wanted: Tuple[bool, ...]
) -> List[Optional[Tensor]]:
    """dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0. `kept`: A, the states that entered, what is kept of the links, do,
    dht; `wanted`: which of the gradients."""
    A, entered, of_links, do, dht = kept
    if not static.exchanges:
        states: Tuple[Optional[Tensor], ...] = (None,) * 4
        wait: Optional[Callable[[], Tensor]] = None
        halves: Optional[Halves] = None
    else:
        K, V = inputs[_Q].shape[-1], inputs[_V].shape[-1]
        link = make_backward_link(options, inputs, parts, of_links, do, dht, A)
        wait = _start(options, "backward links", static, link)
        halves = _before_the_gather(static.backward, link)
    if wait is None or halves is None:
        if wait is not None:
            leaving = entering(options, static, parts, wait(), K, V, True)
            states = (parts.entering_rows, entered, parts.leaving_rows, leaving)
        found = _torch_links.compute(
            "part_backward", (*inputs, *states, A, do, dht), options, inputs, (*states, A, do, dht, wanted)
        )
        return list(_torch._align(found, wanted))
    initial_state = inputs[_H0]
    dh0 = torch.empty_like(initial_state) if wanted[7] and initial_state is not None else None
    gradients = _pieces.Gradients(inputs, dh0, wanted)
    states = (parts.entering_rows, entered, None, None)
    gradients.add(options, halves.local, states, (A, do, dht))
    leaving = entering(options, static, parts, wait(), K, V, True)
    if halves.waiting is not None:
        own = [_pieces.rows_in(rows, halves.waiting) for rows in (parts.entering_rows, parts.leaving_rows)]
        gradients.add(options, halves.waiting, (own[0], entered, own[1], leaving), (A, do, dht))
    return [*gradients.all(), dh0]


class _PartsGatedDeltaRule(torch.autograd.Function):
    """o and final_state of this rank's tokens, differentiable in every floating-point input. Saved: the inputs, A, the
    states that entered and M, 128 KiB a part and value head of 128 x 128."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, static: Static, output_final_state: bool, *tensors: Optional[Tensor]
    ) -> Tuple[Optional[Tensor], ...]:
        count = len(Parts._fields)
        parts, inputs = Parts(*tensors[:count]), tensors[count:]  # type: ignore[arg-type]
        o, final_state, A, entered, kept = _forward(options, static, parts, inputs, output_final_state, True)
        ctx.save_for_backward(*tensors, A, entered, kept)
        ctx.options, ctx.static = options, static
        ctx.set_materialize_grads(False)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Optional[Tensor], dht: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        *tensors, A, entered, kept = ctx.saved_tensors
        options, static = ctx.options, ctx.static
        count = len(Parts._fields)
        parts, inputs = Parts(*tensors[:count]), tuple(tensors[count:])
        needs = ctx.needs_input_grad[3 + count :]
        wanted = (*needs[:7], needs[8])
        gradients = _backward(options, static, parts, inputs, (A, entered, kept, do, dht), wanted)
        gradients[7] = _zero_rows(gradients[7], parts.starts_here, static.masked)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # under create_graph=True
            gradients = _torch.refuse_second_derivatives(options.operation, gradients, (*inputs, do, dht))
        dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0 = gradients
        return (None,) * (3 + count) + (dq, dk, dv, dg, dbeta, dA_log, ddt_bias, None, dh0)


def chunk_of_context(
    options: Options,
    context: Any,
    ranks: Ranks,
    inputs: Sequence[Optional[Tensor]],
    output_final_state: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    """chunk_gated_delta_rule() with a context of several ranks. `inputs`: q .. initial_state."""
    q = inputs[_Q]
    assert q is not None
    compares = not _torch.is_traced() and not _ffi.is_explaining() and agreement.is_wanted()
    if not compares or _torch.is_captured(q):
        plan = plan_of(options.operation, context, q, ranks)
        return chunk(options, plan, (*inputs[:_CU], plan.cu_seqlens, inputs[_H0]), output_final_state)
    try:
        plan = plan_of(options.operation, context, q, ranks)
        inputs = (*inputs[:_CU], plan.cu_seqlens, inputs[_H0])
        check_call(options, inputs, output_final_state)
    except Exception:
        agreement.compare(options.operation, ranks, q.device, None)
        raise
    facts = agreement.facts_of(options, plan, inputs, output_final_state)
    agreement.compare(options.operation, ranks, q.device, facts)
    return chunk(options, plan, inputs, output_final_state)


def check_call(options: Options, inputs: Sequence[Optional[Tensor]], output_final_state: bool) -> None:
    """Raises what this rank can know to be wrong with a call, before anything is exchanged."""
    inputs = tuple(inputs)
    wants_A = _torch._wants_gradient(inputs)
    outputs = _torch_links.forward_outputs(inputs, options.state_v_first, output_final_state, wants_A)
    _torch_links.check_forward(options, inputs, (None, None), outputs)


def chunk(
    options: Options,
    plan: Plan,
    inputs: Sequence[Optional[Tensor]],
    output_final_state: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    """chunk_gated_delta_rule() on this rank's tokens. `inputs`: q .. initial_state, with this rank's cu_seqlens."""
    q, k, v = _torch._autocast(*inputs[:3])  # type: ignore[arg-type]
    inputs = (q, k, v, *inputs[3:])
    if _ffi.is_explaining():
        rest = (None, None, None, output_final_state, _torch._wants_gradient(inputs))
        _torch_links.compute("part_forward", inputs, options, tuple(inputs), rest)
        return q, None
    if plan.serial and plan.exchanges:
        return _serial_exchange.chunk(options, plan, inputs, output_final_state)
    static = static_of(plan)
    if _torch._wants_gradient(inputs):
        return _PartsGatedDeltaRule.apply(options, static, output_final_state, *plan.parts, *inputs)
    found = _forward(options, static, plan.parts, inputs, output_final_state, False)
    return found[0], found[1]  # type: ignore[return-value]
