"""Megatron-LM: the four functions of its chunkwise context parallelism (megatron.core.ssm.context_parallel.chunkwise),
for the gated delta rule. Megatron gathers what prepare returns and hands a slice of it to apply; nothing here
communicates.

    from flash_qla.integrations.megatron import chunkwise_backend

    output = gdp_chunkwise_context_parallel(.., cp_group=group, backend=chunkwise_backend(), ..)

A summary is one packed link (docs/several_cards.md): [Hv, K (V + K) + 4] float32 of packed sequences, [B, Hv, ..] of
rows of a batch. The protocol has no initial and final states. Each sequence is planned from its own length alone
(auto_cp="invariant"), so that packed samples do not change each other's bits."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, NamedTuple, Optional, Tuple

__all__ = [
    "chunkwise_backend",
    "cp_backward_apply",
    "cp_backward_prepare",
    "cp_forward_apply",
    "cp_forward_prepare",
]

_PROTOCOL = "megatron.core.ssm.context_parallel.chunkwise"
_ADAPTER = "megatron.core.ssm.context_parallel.gdp_common"


@dataclasses.dataclass(frozen=True)
class _PackedSummary:
    """Megatron's CPForwardPackedSummary and CPBackwardPackedSummary, where it is not installed."""

    packed: Any


@dataclasses.dataclass(frozen=True)
class _SavedContext:
    """Megatron's CPSavedContext, likewise."""

    tensors: Tuple[Any, ...]
    metadata: Any = None


def _megatron(name: str, stand_in: Any) -> Any:
    try:
        return getattr(importlib.import_module(_PROTOCOL), name)
    except (AttributeError, ImportError):
        return stand_in


class _Local(NamedTuple):
    """What a call goes on with between its two halves: options, inputs q .. initial_state, the parts, and more."""

    options: Any
    inputs: Tuple[Any, ...]
    parts: Any
    more: Tuple[Any, ...]  # forward: what is kept of the links. Backward: A, the states that entered, do


class _Metadata(NamedTuple):
    """What is saved beside tensors."""

    options: Any
    has_offsets: bool


def _options(inputs: Any) -> Any:
    from .._options import make_options

    householder = getattr(inputs, "num_householder", 1)
    if householder != 1:
        raise NotImplementedError(f"cp_forward_prepare: num_householder ({householder}) must be 1: one product a token")
    return make_options("cp_forward_prepare", inputs.scale, auto_cp="invariant")


def _parts(q: Any, cu_seqlens: Optional[Any]) -> Any:
    """A rank's parts without a look at its neighbours: of packed sequences the first may have come from the left and
    the last may go on to the right; rows of a batch do both."""
    import torch

    from ..distributed.cut import Parts

    device = q.device
    if cu_seqlens is None:
        count = q.shape[0]
        numbers = torch.arange(count, device=device)
        rows = numbers[:, None].expand(count, 2)
        through = torch.ones(count, dtype=torch.bool, device=device)
    else:
        filled = cu_seqlens[1:] > cu_seqlens[:-1]
        numbers = torch.arange(filled.shape[0], device=device)
        first = torch.where(filled, numbers, filled.shape[0]).amin()
        last = torch.where(filled, numbers, -1).amax()
        rows = torch.stack((torch.where(last < 0, -1, first), last))[None]
        through = rows[:, 0] == rows[:, 1]
    tokens = rows[:, 0] >= 0
    place = torch.zeros(1, dtype=torch.int64, device=device)
    return Parts(rows, tokens, tokens, through & tokens, rows[:, 0], rows[:, 1], tokens, tokens, None, place)


def _to_summary(link: Any, cu_seqlens: Optional[Any]) -> Any:
    """[P, Hv, row] as Megatron gathers it: packed sequences have one part."""
    return (link if cu_seqlens is None else link[0]).contiguous()


def _entering(local: _Local, summaries: Any, backward: bool) -> Any:
    """What comes out of the neighbours' links, [P, Hv, K, V]; zeros where there are none."""
    from .. import _torch_links

    q, v, cu_seqlens = local.inputs[0], local.inputs[2], local.inputs[7]
    K, V = q.shape[-1], v.shape[-1]
    packed = summaries.packed
    links = packed if cu_seqlens is None else packed[:, None]  # [n, streams, Hv, row]
    place = links.new_full((1,), -1 if backward else links.shape[0], dtype=local.parts.rows.dtype)
    wanted = place.new_ones(1, dtype=local.parts.enters.dtype)
    path, operation = local.options.path, local.options.operation
    return _torch_links.combine(operation, path, links, K, V, None, place, wanted, backward)[0]


def cp_forward_prepare(inputs: Any) -> Tuple[Any, Any]:
    """The summary of this rank's last sequence, and what cp_forward_apply() goes on with.

    Args:
        inputs: an object with q, k [B, T, Hq, K], v [B, T, Hv, V], g (log decay) and beta [B, T, Hv], cu_seqlens [R +
            1] of this rank's packed tokens (B = 1) or None, num_householder (1) and scale.

    Returns:
        Megatron's CPForwardPackedSummary, and a context.

    Raises:
        NotImplementedError: num_householder is not 1.
        ValueError, TypeError: as chunk_gated_delta_rule().
    """
    from .. import _context_parallel

    options = _options(inputs)
    cu_seqlens = inputs.cu_seqlens
    tensors = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, None, None, cu_seqlens, None)
    _context_parallel.check_call(options, tensors, False)
    parts = _parts(inputs.q, cu_seqlens)
    link, carry = _context_parallel.make_link(options, tensors, parts)
    kept = _context_parallel.keep_of(link, inputs.q.shape[-1], inputs.v.shape[-1])
    summary = _megatron("CPForwardPackedSummary", _PackedSummary)(packed=_to_summary(link, cu_seqlens))
    return summary, _Local(options, tensors, parts, (kept, carry))


def cp_forward_apply(local_context: Any, preceding_summaries: Any) -> Tuple[Any, Any]:
    """o [B, T, Hv, V] from the summaries of the ranks before, in their order, and what the backward pass needs.

    Args:
        local_context: of cp_forward_prepare().
        preceding_summaries: packed [n, ..], from the rank in which this rank's first sequence begins; n may be 0.

    Returns:
        o, and Megatron's CPSavedContext.
    """
    from .. import _torch_links

    local: _Local = local_context
    entered = _entering(local, preceding_summaries, False)
    kept, carry = local.more
    rest = (local.parts.entering_rows, entered, carry, False, True)
    o, A = _torch_links.compute("part_forward", (*local.inputs, *rest[:3]), local.options, local.inputs, rest)
    offsets = local.inputs[7]
    tensors = (*local.inputs[:5], A, entered, kept, *(() if offsets is None else (offsets,)))
    metadata = _Metadata(local.options, offsets is not None)
    return o, _megatron("CPSavedContext", _SavedContext)(tensors=tensors, metadata=metadata)


def cp_backward_prepare(output_grad: Any, saved_context: Any) -> Tuple[Any, Any]:
    """The summary of the gradient of the state before this rank's first sequence, and what cp_backward_apply() goes on
    with.

    Args:
        output_grad: gradient of o, any strides.
        saved_context: of cp_forward_apply().

    Returns:
        Megatron's CPBackwardPackedSummary, and a context.
    """
    from .. import _context_parallel

    tensors, metadata = saved_context.tensors, saved_context.metadata
    q, k, v, g, beta, A, entered, kept, *offsets = tensors
    cu_seqlens = offsets[0] if metadata.has_offsets else None
    inputs = (q, k, v, g, beta, None, None, cu_seqlens, None)
    parts = _parts(q, cu_seqlens)
    link = _context_parallel.make_backward_link(metadata.options, inputs, parts, kept, output_grad, None, A)
    summary = _megatron("CPBackwardPackedSummary", _PackedSummary)(packed=_to_summary(link, cu_seqlens))
    return summary, _Local(metadata.options, inputs, parts, (A, entered, output_grad))


def cp_backward_apply(backward_context: Any, following_summaries: Any) -> Tuple[Any, ...]:
    """dq, dk, dv, dg, dbeta in their inputs' dtypes, from the summaries of the ranks behind, in their order.

    Args:
        backward_context: of cp_backward_prepare().
        following_summaries: packed [n, ..], up to the rank in which this rank's last sequence ends; n may be 0.
    """
    from .. import _torch_links

    local: _Local = backward_context
    A, entered, do = local.more
    leaving = _entering(local, following_summaries, True)
    states = (local.parts.entering_rows, entered, local.parts.leaving_rows, leaving)
    wanted = [*(x is not None for x in local.inputs[:5]), False, False, False]
    rest = (*states, A, do, None, wanted)
    tensors = (*local.inputs, *states, A, do, None)
    found = _torch_links.compute("part_backward", tensors, local.options, local.inputs, rest)
    gradients = iter(found)
    return tuple(next(gradients) if want else None for want in wanted[:5])


class _Backend:
    """The four functions as methods, with Megatron's autograd adapter where it is installed."""

    cp_forward_prepare = staticmethod(cp_forward_prepare)
    cp_forward_apply = staticmethod(cp_forward_apply)
    cp_backward_prepare = staticmethod(cp_backward_prepare)
    cp_backward_apply = staticmethod(cp_backward_apply)

    @property
    def autograd_function(self) -> Any:
        return importlib.import_module(_ADAPTER).GDPChunkwiseContextParallel


def chunkwise_backend() -> Any:
    """A backend for Megatron's gdp_chunkwise_context_parallel()."""
    return _Backend()
